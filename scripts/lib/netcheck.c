// Traffic that checks itself, for the two ends of a test or a measurement; in the guest and on the host.
//
//   netcheck stream listen|connect send|receive ADDRESS PORT MIB SEED
//   netcheck rr listen ADDRESS PORT
//   netcheck rr connect ADDRESS PORT SECONDS [BYTES]
//   netcheck udp listen ADDRESS PORT
//   netcheck udp connect ADDRESS PORT COUNT MAXIMUM_BYTES
//   netcheck udp burst ADDRESS PORT BYTES PIECE_BYTES
//
// ADDRESS is IPv4 or IPv6: where to listen, or whom to connect to.
//
// stream: one TCP stream of MIB MiB whose bytes follow from SEED. Both ends print `BYTES HASH`: the sender of what it made, the
// receiver of what came, up to the end of the stream. Equal lines mean equal bytes. The receiver also knows what should have come: it
// says on stderr where the first wrong byte is, and ends with status 1. Pieces of all sizes are written, from a byte to 256 KiB, so that
// the stack makes all sizes of segments; SEED decides.
//
// rr: one byte (or BYTES) there and back over one TCP connection, and again, as netperf's TCP_RR does: prints
// `TRANSACTIONS_PER_SECOND MEDIAN_US P99_US`. The listener serves one connection after the other until it is ended.
//
// udp: datagrams of sizes 16 to MAXIMUM_BYTES, each sent back by the listener, which says when it is `listening`. Prints `SENT RETURNED WRONG TWICE`; a lost one is
// given up after 20 ms. Status 1 if any was wrong.
//
// burst: BYTES that one system call sends in datagrams of PIECE_BYTES (UDP_SEGMENT), from port PORT as well; a listener sends each back. Prints
// `SENT RETURNED WRONG`; done when all have come and no more for 500 ms, or none for 10 s. Two bursts with the same arguments are the same frames: a socket that is
// not connected and whose packets must not be fragmented has an IPv4 identification of 0 (ip_select_ident_segs in include/net/ip.h). Status 1 if any was wrong.
//
// Theory of operation. The words of a stream are those of a counter-based generator (splitmix64), so that the place of an error can be
// told; the hash is a chain of invertible steps a word (xor, multiply by an odd number, rotate), so that two streams that differ in one
// word never have the same one, and others with a chance of 2^-64. It is cheap, because the guest may be an interpreted one. It is no
// defence against somebody who wants to deceive, and need not be. Statically linked, so that it runs in an initramfs.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PIECE_MAX (256 << 10)
#define UDP_HEADER 16
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

static void fail(const char *what)
{
	fprintf(stderr, "netcheck: %s: %s\n", what, strerror(errno));
	exit(2);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

// Word `index` of the stream `seed`.
static uint64_t word_at(uint64_t seed, uint64_t index)
{
	uint64_t word = (seed + index) * 0x9e3779b97f4a7c15ull;

	word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
	return word ^ (word >> 27);
}

static uint64_t hash_word(uint64_t hash, uint64_t word)
{
	hash = (hash ^ word) * 0xff51afd7ed558ccdull;
	return (hash << 31) | (hash >> 33);
}

// ---- sockets -----------------------------------------------------------------------------------------------------

static socklen_t parse_address(const char *address, const char *port, struct sockaddr_storage *out)
{
	struct sockaddr_in *v4 = (void *)out;
	struct sockaddr_in6 *v6 = (void *)out;

	memset(out, 0, sizeof(*out));
	if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(atoi(port));
		return sizeof(*v4);
	}
	if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(atoi(port));
		return sizeof(*v6);
	}
	fprintf(stderr, "netcheck: '%s' is no address\n", address);
	exit(2);
}

static int open_socket(int listening, int type, const char *address, const char *port)
{
	struct sockaddr_storage to;
	socklen_t length = parse_address(address, port, &to);
	int fd = socket(to.ss_family, type, 0), one = 1, tries = 0;

	if (fd < 0)
		fail("socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (listening) {
		if (bind(fd, (void *)&to, length) < 0)
			fail("bind");
		if (type == SOCK_STREAM && listen(fd, 8) < 0)
			fail("listen");
		return fd;
	}
	// The listener may be a moment late.
	while (connect(fd, (void *)&to, length) < 0) {
		if (errno != ECONNREFUSED || ++tries == 50)
			fail("connect");
		usleep(100000);
	}
	return fd;
}

static int tcp_connection(const char *role, const char *address, const char *port)
{
	int listening = strcmp(role, "listen") == 0, fd = open_socket(listening, SOCK_STREAM, address, port), connection = fd;

	if (listening) {
		connection = accept(fd, NULL, NULL);
		if (connection < 0)
			fail("accept");
		close(fd);
	}
	return connection;
}

static void write_all(int fd, const char *bytes, size_t count)
{
	while (count) {
		ssize_t wrote = write(fd, bytes, count);

		if (wrote < 0)
			fail("write");
		bytes += wrote;
		count -= wrote;
	}
}

// ---- stream ------------------------------------------------------------------------------------------------------

static void stream_send(int fd, uint64_t words, uint64_t seed)
{
	static uint64_t buffer[PIECE_MAX / 8];
	uint64_t hash = 0, at = 0, sizes = seed ^ 0x5851f42d4c957f2dull;
	char end;

	while (at < words) {
		uint64_t count = words - at < PIECE_MAX / 8 ? words - at : PIECE_MAX / 8;
		const char *bytes = (const char *)buffer;
		size_t left = count * 8;

		for (uint64_t i = 0; i < count; i++) {
			buffer[i] = word_at(seed, at + i);
			hash = hash_word(hash, buffer[i]);
		}
		// Sizes spread evenly over the powers of two: a quarter of the bytes is in pieces below 64 KiB.
		while (left) {
			uint64_t random = word_at(sizes, at + left);
			size_t piece = 1 + (random >> 8) % (2048ull << (random % 8));

			piece = piece < left ? piece : left;
			write_all(fd, bytes, piece);
			bytes += piece;
			left -= piece;
		}
		at += count;
	}
	shutdown(fd, SHUT_WR);
	// Its own end comes when the other side has read everything.
	if (read(fd, &end, 1) < 0)
		fail("waiting for the other end");
	printf("%llu %016llx\n", (unsigned long long)words * 8, (unsigned long long)hash);
}

static int stream_receive(int fd, uint64_t words, uint64_t seed)
{
	static uint64_t buffer[PIECE_MAX / 8];
	uint64_t hash = 0, at = 0, bytes = 0, wrong = UINT64_MAX;
	size_t held = 0;

	for (;;) {
		ssize_t got = read(fd, (char *)buffer + held, sizeof(buffer) - held);

		if (got < 0)
			fail("read");
		if (got == 0)
			break;
		bytes += got;
		held += got;
		for (size_t i = 0; i < held / 8; i++, at++) {
			hash = hash_word(hash, buffer[i]);
			if (buffer[i] != word_at(seed, at) && wrong == UINT64_MAX)
				wrong = at;
		}
		buffer[0] = buffer[held / 8];
		held %= 8;
	}
	printf("%llu %016llx\n", (unsigned long long)bytes, (unsigned long long)hash);
	if (wrong != UINT64_MAX)
		fprintf(stderr, "netcheck: the first wrong word is at byte %llu\n", (unsigned long long)wrong * 8);
	if (bytes != words * 8)
		fprintf(stderr, "netcheck: %llu bytes came, not %llu\n", (unsigned long long)bytes, (unsigned long long)words * 8);
	return wrong != UINT64_MAX || bytes != words * 8;
}

// ---- request and response ----------------------------------------------------------------------------------------

static void rr_listen(const char *address, const char *port)
{
	static char buffer[65536];
	int listener = open_socket(1, SOCK_STREAM, address, port), one = 1;

	for (;;) {
		int fd = accept(listener, NULL, NULL);
		ssize_t got;

		if (fd < 0)
			fail("accept");
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		// Whatever comes goes back at once; the other end waits until it has all.
		while ((got = read(fd, buffer, sizeof(buffer))) > 0)
			write_all(fd, buffer, got);
		close(fd);
	}
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static void rr_connect(const char *address, const char *port, double seconds, size_t bytes)
{
	static char buffer[65536];
	static uint32_t taken_ns[1 << 20];
	int fd = open_socket(0, SOCK_STREAM, address, port), one = 1;
	uint64_t begun = now_ns(), last = begun, count = 0, kept;

	bytes = bytes < 1 ? 1 : bytes > sizeof(buffer) ? sizeof(buffer) : bytes;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	while (last - begun < seconds * 1e9) {
		uint64_t start = last;

		write_all(fd, buffer, bytes);
		for (size_t got = 0; got < bytes;) {
			ssize_t more = read(fd, buffer, sizeof(buffer));

			if (more <= 0)
				fail("read");
			got += more;
		}
		last = now_ns();
		taken_ns[count++ % (1 << 20)] = last - start > UINT32_MAX ? UINT32_MAX : last - start;
	}
	kept = count < 1 << 20 ? count : 1 << 20;
	qsort(taken_ns, kept, sizeof(taken_ns[0]), by_value);
	printf("%.1f %.1f %.1f\n", count * 1e9 / (last - begun), taken_ns[kept / 2] / 1e3, taken_ns[kept * 99 / 100] / 1e3);
}

// ---- datagrams ---------------------------------------------------------------------------------------------------

static void udp_listen(const char *address, const char *port)
{
	static char buffer[65536];
	int fd = open_socket(1, SOCK_DGRAM, address, port);

	puts("listening");
	fflush(stdout);
	for (;;) {
		struct sockaddr_storage from;
		socklen_t length = sizeof(from);
		ssize_t got = recvfrom(fd, buffer, sizeof(buffer), 0, (void *)&from, &length);

		if (got >= 0)
			sendto(fd, buffer, got, 0, (void *)&from, length);
	}
}

// Datagram `number`: number and size as words, then bytes that follow from the number.
static size_t make_datagram(unsigned char *out, uint64_t number, size_t maximum)
{
	uint64_t size = UDP_HEADER + word_at(77, number) % (maximum - UDP_HEADER + 1);

	memcpy(out, &number, 8);
	memcpy(out + 8, &size, 8);
	for (size_t i = UDP_HEADER; i < size; i++)
		out[i] = word_at(number, i) >> 32;
	return size;
}

static int udp_connect(const char *address, const char *port, uint64_t count, size_t maximum)
{
	static unsigned char sent[65536], got[65536], want[65536];
	struct timeval limit = {.tv_usec = 20000};
	unsigned char *seen = calloc(count + 1, 1);
	int fd = open_socket(0, SOCK_DGRAM, address, port);
	uint64_t returned = 0, wrong = 0, twice = 0;

	maximum = maximum < UDP_HEADER ? UDP_HEADER : maximum > 65000 ? 65000 : maximum;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	for (uint64_t number = 0; number < count; number++) {
		size_t size = make_datagram(sent, number, maximum);
		uint64_t which = number + 1;

		if (send(fd, sent, size, 0) < 0 && errno != ECONNREFUSED && errno != ENOBUFS)
			fail("send");
		// One late answer may come before this one's.
		for (int tries = 0; tries < 8 && which != number; tries++) {
			ssize_t length = recv(fd, got, sizeof(got), 0);

			if (length < 0)
				break;
			memcpy(&which, got, length < 8 ? length : 8);
			if (length < UDP_HEADER || which >= count || make_datagram(want, which, maximum) != (size_t)length ||
			    memcmp(got, want, length) != 0) {
				wrong++;
			} else if (seen[which]++) {
				twice++;
			} else {
				returned++;
			}
		}
	}
	printf("%llu %llu %llu %llu\n", (unsigned long long)count, (unsigned long long)returned, (unsigned long long)wrong,
	       (unsigned long long)twice);
	return wrong != 0;
}

static int udp_burst(const char *address, const char *port, size_t bytes, int piece)
{
	static unsigned char sent[65536], got[65536];
	struct timeval limit = {.tv_sec = 10}, more = {.tv_usec = 500000};
	struct sockaddr_storage to, from;
	socklen_t length = parse_address(address, port, &to);
	int fd = socket(to.ss_family, SOCK_DGRAM, 0), whole = IP_PMTUDISC_DO;
	size_t pieces, returned = 0, wrong = 0;
	ssize_t came;

	bytes = bytes > 65000 ? 65000 : bytes;
	piece = piece < 8 ? 8 : piece;
	pieces = (bytes + piece - 1) / piece;
	// The number of each piece is in its first byte.
	for (size_t i = 0; i < bytes; i++)
		sent[i] = i % piece == 0 ? i / piece : word_at(77, i) >> 32;
	parse_address(to.ss_family == AF_INET ? "0.0.0.0" : "::", port, &from);
	if (fd < 0 || bind(fd, (void *)&from, length) < 0)
		fail("bind");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &whole, sizeof(whole));
	if (setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &piece, sizeof(piece)) < 0)
		fail("UDP_SEGMENT");
	if (sendto(fd, sent, bytes, 0, (void *)&to, length) < 0)
		fail("sendto");
	while ((came = recv(fd, got, sizeof(got), 0)) > 0) {
		size_t start = (size_t)got[0] * piece, want = start >= bytes ? 0 : bytes - start < (size_t)piece ? bytes - start : (size_t)piece;

		if ((size_t)came == want && memcmp(got, sent + start, want) == 0)
			returned++;
		else
			wrong++;
		if (returned + wrong == pieces)
			setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &more, sizeof(more));
	}
	printf("%zu %zu %zu\n", pieces, returned, wrong);
	return wrong != 0;
}

static void usage(void)
{
	fprintf(stderr, "usage: netcheck stream listen|connect send|receive ADDRESS PORT MIB SEED\n"
			"       netcheck rr|udp listen ADDRESS PORT\n"
			"       netcheck rr connect ADDRESS PORT SECONDS [BYTES]\n"
			"       netcheck udp connect ADDRESS PORT COUNT MAXIMUM_BYTES\n"
			"       netcheck udp burst ADDRESS PORT BYTES PIECE_BYTES\n");
	exit(2);
}

int main(int count, char **words)
{
	int listening = count > 2 && strcmp(words[2], "listen") == 0;

	signal(SIGPIPE, SIG_IGN);
	if (count == 8 && strcmp(words[1], "stream") == 0) {
		int fd = tcp_connection(words[2], words[4], words[5]);
		uint64_t size = strtoull(words[6], NULL, 0) << 17, seed = strtoull(words[7], NULL, 0);

		if (strcmp(words[3], "receive") == 0)
			return stream_receive(fd, size, seed);
		stream_send(fd, size, seed);
	} else if (count == 5 && listening && strcmp(words[1], "rr") == 0) {
		rr_listen(words[3], words[4]);
	} else if (count >= 6 && !listening && strcmp(words[1], "rr") == 0) {
		rr_connect(words[3], words[4], atof(words[5]), count > 6 ? strtoul(words[6], NULL, 0) : 1);
	} else if (count == 5 && listening && strcmp(words[1], "udp") == 0) {
		udp_listen(words[3], words[4]);
	} else if (count == 7 && strcmp(words[1], "udp") == 0 && strcmp(words[2], "burst") == 0) {
		return udp_burst(words[3], words[4], strtoul(words[5], NULL, 0), atoi(words[6]));
	} else if (count == 7 && !listening && strcmp(words[1], "udp") == 0) {
		return udp_connect(words[3], words[4], strtoull(words[5], NULL, 0), strtoul(words[6], NULL, 0));
	} else {
		usage();
	}
	return 0;
}
