// Traffic that checks itself, for the two ends of a test or a measurement; in the guest and on the host.
//
//   netcheck stream listen|connect send|receive ADDRESS PORT MIB SEED
//   netcheck rr listen ADDRESS PORT
//   netcheck rr connect ADDRESS PORT SECONDS [BYTES [CONNECTIONS]]
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
// rr: a request of one byte (or BYTES, up to 64 KiB) there and a response of as many back over a TCP connection, and
// again, as netperf's TCP_RR does; over CONNECTIONS at once (up to 64), with a process each on both ends. The listener
// sends a response when the request is whole, and the other end the next request when the response is. A response is
// the request's bytes, which differ from one request to the next: a byte that went wrong on either way is told, with
// status 1. Prints `TRANSACTIONS_PER_SECOND MEDIAN_US P99_US`, of all connections together. 20 s without a response
// end it with status 2. The listener serves until it is ended. A connection begins with the size of its requests, four
// bytes, big-endian.
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
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PIECE_MAX (256 << 10)
#define UDP_HEADER 16
#define RR_BYTES_MAX (64 << 10)
#define RR_CONNECTIONS_MAX 64
// How many requests begin at different bytes of the pattern, one after the other.
#define RR_SHIFTS 4096
// Times of transactions that are kept, of all connections.
#define RR_KEPT (1 << 20)
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

// One connection's outcome, in memory that its process shares with the one that started it.
struct rr_outcome {
	uint64_t count, elapsed_ns;
};

// Whether all came before the other end closed.
static int read_all(int fd, char *bytes, size_t count)
{
	while (count) {
		ssize_t got = read(fd, bytes, count);

		if (got < 0)
			fail("read");
		if (got == 0)
			return 0;
		bytes += got;
		count -= got;
	}
	return 1;
}

static void rr_serve(int fd)
{
	static char request[RR_BYTES_MAX];
	int one = 1;
	uint32_t size;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	if (!read_all(fd, (char *)&size, sizeof(size)) || ntohl(size) < 1 || ntohl(size) > RR_BYTES_MAX)
		return;
	while (read_all(fd, request, ntohl(size)))
		write_all(fd, request, ntohl(size));
}

static void rr_listen(const char *address, const char *port)
{
	int listener = open_socket(1, SOCK_STREAM, address, port);

	// Nobody waits for the processes.
	signal(SIGCHLD, SIG_IGN);
	for (;;) {
		int fd = accept(listener, NULL, NULL);
		pid_t child;

		if (fd < 0)
			fail("accept");
		child = fork();
		if (child < 0)
			fail("fork");
		if (child == 0) {
			close(listener);
			rr_serve(fd);
			exit(0);
		}
		close(fd);
	}
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

// Requests over connection `number` for that long; the exit status. `taken_ns` has room for `room` times, and keeps the
// last ones.
static int rr_transact(int fd, int number, double seconds, size_t bytes, struct rr_outcome *out, uint32_t *taken_ns,
		       size_t room)
{
	static uint64_t pattern[(RR_BYTES_MAX + RR_SHIFTS) / 8];
	static char response[RR_BYTES_MAX];
	uint64_t begun, last;

	// Not word 0 of seed 0, whose bytes are all alike.
	for (size_t i = 0; i < sizeof(pattern) / 8; i++)
		pattern[i] = word_at((uint64_t)(number + 1) << 32, i);
	begun = last = now_ns();
	do {
		const char *request = (const char *)pattern + out->count % RR_SHIFTS;
		uint64_t start = last;

		write_all(fd, request, bytes);
		if (!read_all(fd, response, bytes)) {
			fprintf(stderr, "netcheck: the other end closed before response %llu\n", (unsigned long long)out->count);
			return 1;
		}
		last = now_ns();
		if (memcmp(request, response, bytes) != 0) {
			fprintf(stderr, "netcheck: response %llu has wrong bytes\n", (unsigned long long)out->count);
			return 1;
		}
		taken_ns[out->count++ % room] = last - start > UINT32_MAX ? UINT32_MAX : last - start;
	} while (last - begun < seconds * 1e9);
	out->elapsed_ns = last - begun;
	return 0;
}

static int rr_open(const char *address, const char *port, size_t bytes)
{
	struct timeval limit = {.tv_sec = 20};
	int fd = open_socket(0, SOCK_STREAM, address, port), one = 1;
	uint32_t size = htonl(bytes);

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	write_all(fd, (const char *)&size, sizeof(size));
	return fd;
}

static void rr_print(const struct rr_outcome *outcomes, int connections, uint32_t *taken_ns, size_t room)
{
	double per_second = 0;
	size_t kept = 0;

	for (int i = 0; i < connections; i++) {
		size_t count = outcomes[i].count < room ? outcomes[i].count : room;

		memmove(taken_ns + kept, taken_ns + i * room, count * sizeof(*taken_ns));
		kept += count;
		per_second += outcomes[i].count * 1e9 / outcomes[i].elapsed_ns;
	}
	qsort(taken_ns, kept, sizeof(*taken_ns), by_value);
	printf("%.1f %.1f %.1f\n", per_second, taken_ns[kept / 2] / 1e3, taken_ns[kept * 99 / 100] / 1e3);
}

static void *shared_memory(size_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		fail("mmap");
	return memory;
}

static int rr_connect(const char *address, const char *port, double seconds, size_t bytes, int connections)
{
	struct rr_outcome *outcomes = shared_memory(RR_CONNECTIONS_MAX * sizeof(*outcomes));
	uint32_t *taken_ns = shared_memory(RR_KEPT * sizeof(*taken_ns));
	pid_t children[RR_CONNECTIONS_MAX];
	int fds[RR_CONNECTIONS_MAX], worst = 0;
	size_t room;

	if (bytes < 1 || bytes > RR_BYTES_MAX || connections < 1 || connections > RR_CONNECTIONS_MAX) {
		fprintf(stderr, "netcheck: %zu bytes over %d connections; choose 1 to %d and 1 to %d\n", bytes, connections,
			RR_BYTES_MAX, RR_CONNECTIONS_MAX);
		return 2;
	}
	room = RR_KEPT / connections;
	// All are there before the first one begins.
	for (int i = 0; i < connections; i++)
		fds[i] = rr_open(address, port, bytes);
	for (int i = 0; i < connections; i++) {
		children[i] = fork();
		if (children[i] < 0)
			fail("fork");
		if (children[i] == 0)
			exit(rr_transact(fds[i], i, seconds, bytes, &outcomes[i], taken_ns + i * room, room));
	}
	for (int i = 0; i < connections; i++) {
		int status = 0, code;

		if (waitpid(children[i], &status, 0) < 0)
			fail("waitpid");
		code = WIFEXITED(status) ? WEXITSTATUS(status) : 2;
		worst = code > worst ? code : worst;
	}
	if (worst == 0)
		rr_print(outcomes, connections, taken_ns, room);
	return worst;
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
			"       netcheck rr connect ADDRESS PORT SECONDS [BYTES [CONNECTIONS]]\n"
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
		return rr_connect(words[3], words[4], atof(words[5]), count > 6 ? strtoul(words[6], NULL, 0) : 1,
				  count > 7 ? atoi(words[7]) : 1);
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
