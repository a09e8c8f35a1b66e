//! Entry points of the fuzz targets (`fuzz/`): parts of the daemon, without the daemon.
