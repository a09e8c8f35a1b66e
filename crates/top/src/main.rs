//! `vhost-af-xdp-top`: ports, queues and workers of running daemons, live in the terminal.
//!
//! A thread of its own asks the daemons, so that keys work while a daemon does not answer. The tables are those of
//! `status` ([`client::text::views`]); [`app`] sorts and draws them.

mod app;

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Parser as _;
use client::connection::Daemons;
use client::top::{Top, TopArgs};
use model::state::Status;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use signal_hook::consts::SIGTERM;

use self::app::App;

/// Longest wait for a key, after which new readings and signals are checked.
const KEY_WAIT: Duration = Duration::from_millis(100);

/// How often daemons that were started meanwhile are searched for.
const FIND_AGAIN: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    program::log::exit("vhost-af-xdp-top", run(&Top::parse().args))
}

fn run(args: &TopArgs) -> anyhow::Result<()> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        bail!("standard input and output must be a terminal: `vhost-af-xdp status` prints the state once");
    }
    // Without a daemon there is nothing to show.
    let (daemons, first) = Daemons::find(args.control.as_deref())?;
    let ends = Arc::new(AtomicBool::new(false));
    // SIGHUP keeps its default action, the end of the process: crossterm would read a closed terminal forever.
    signal_hook::flag::register(SIGTERM, Arc::clone(&ends)).context("cannot handle signals")?;
    let readings = read(args.clone(), daemons)?;
    let mut app = App::new(first);
    let mut terminal = ratatui::try_init().context("cannot set up the terminal")?;
    let ended = show(&mut terminal, &mut app, &readings, &ends);
    ratatui::restore();
    ended.context("the terminal failed")
}

/// Draws whatever changes, until a key or a signal ends it.
fn show(
    terminal: &mut DefaultTerminal,
    app: &mut App,
    readings: &Receiver<Reading>,
    ends: &AtomicBool,
) -> io::Result<()> {
    let mut is_changed = true;
    while !ends.load(Relaxed) {
        if std::mem::take(&mut is_changed) {
            terminal.draw(|frame| app.draw(frame))?;
        }
        if event::poll(KEY_WAIT)? {
            is_changed = true;
            if let Event::Key(key) = event::read()?
                && !app.press(key)
            {
                return Ok(());
            }
        }
        while let Ok(reading) = readings.try_recv() {
            app.update(reading);
            is_changed = true;
        }
    }
    Ok(())
}

/// What daemons answer, or why none does.
type Reading = Result<Vec<Status>, String>;

/// Asks the daemons repeatedly, until the receiver is dropped. It searches for other daemons only now and then: a
/// socket that does not answer takes ten seconds.
fn read(args: TopArgs, mut daemons: Daemons) -> anyhow::Result<Receiver<Reading>> {
    // One reading may wait: a terminal that is slow must not make them pile up.
    let (sender, receiver) = mpsc::sync_channel(1);
    let body = move || {
        let mut found = Instant::now();
        loop {
            std::thread::sleep(Duration::from_secs(args.interval));
            let mut reading = Ok(daemons.ask());
            if matches!(&reading, Ok(known) if known.is_empty()) || found.elapsed() >= FIND_AGAIN {
                found = Instant::now();
                reading = Daemons::find(args.control.as_deref()).map(|(again, statuses)| {
                    daemons = again;
                    statuses
                });
            }
            if sender.send(reading.map_err(|error| error.to_string())).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("readings".to_owned())
        .spawn(body)
        .context("cannot start a thread")?;
    Ok(receiver)
}
