#define _GNU_SOURCE /* SOCK_NONBLOCK, MSG_NOSIGNAL */

#include "door.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PROTOCOL 1
#define HEADER 5
#define MAX_ANSWER (1024 * 1024)
#define FULL_QUEUE_MS 10

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Wait until something can be done with the socket. Returns NULL, or why it cannot. */
static const char *wait_for(int fd, short what, long ends_ms)
{
	for (;;) {
		long left = ends_ms - now_ms();
		struct pollfd one = {.fd = fd, .events = what};
		int ready = poll(&one, 1, left > 0 ? (int)left : 0);

		if (ready > 0)
			return NULL;
		if (!ready)
			return "timed out";
		if (errno != EINTR)
			return strerror(errno);
	}
}

/* A queue that is full for a moment is told at once where a socket does not block. */
static const char *join(int fd, const char *path, long ends_ms)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	if (strlen(path) >= sizeof address.sun_path)
		return "the path is too long for a socket";
	memcpy(address.sun_path, path, strlen(path));
	while (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
		if (errno != EINTR && (errno != EAGAIN || now_ms() > ends_ms))
			return strerror(errno);
		poll(NULL, 0, FULL_QUEUE_MS);
	}
	return NULL;
}

static const char *send_all(int fd, const char *bytes, size_t size, long ends_ms)
{
	while (size) {
		const char *why = wait_for(fd, POLLOUT, ends_ms);
		if (why)
			return why;
		ssize_t sent = send(fd, bytes, size, MSG_NOSIGNAL);
		if (sent < 0 && errno != EINTR && errno != EAGAIN)
			return strerror(errno);
		if (sent > 0) {
			bytes += sent;
			size -= (size_t)sent;
		}
	}
	return NULL;
}

static const char *receive(int fd, struct text *answer, size_t size, long ends_ms)
{
	char chunk[16384];

	while (size) {
		const char *why = wait_for(fd, POLLIN, ends_ms);
		if (why)
			return why;
		ssize_t got = recv(fd, chunk, size < sizeof chunk ? size : sizeof chunk, 0);
		if (!got)
			return "it closed the connection";
		if (got < 0 && errno != EINTR && errno != EAGAIN)
			return strerror(errno);
		if (got > 0) {
			text_bytes(answer, chunk, (size_t)got);
			size -= (size_t)got;
		}
	}
	return NULL;
}

static const char *converse(int fd, const struct text *request, long ends_ms, struct text *answer)
{
	static char too_large[64];
	uint32_t size = (uint32_t)request->size;
	const char header[HEADER] = {(char)(size >> 24), (char)(size >> 16), (char)(size >> 8),
				     (char)size, PROTOCOL};
	struct text said = {0};

	const char *why = send_all(fd, header, HEADER, ends_ms);
	if (!why)
		why = send_all(fd, request->at, request->size, ends_ms);
	if (!why)
		why = receive(fd, &said, HEADER, ends_ms);
	if (why)
		return why;
	const unsigned char *b = (const unsigned char *)said.at;
	size = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
	if (b[4] != PROTOCOL)
		return "it speaks another version of the protocol";
	if (size > MAX_ANSWER) {
		snprintf(too_large, sizeof too_large, "an answer of %u bytes is too large", size);
		return too_large;
	}
	why = receive(fd, answer, size, ends_ms);
	text_bytes(answer, "", 1);
	answer->size--;
	return why;
}

const char *door_ask(const char *path, const struct text *request, long timeout_ms,
		     struct text *answer)
{
	long ends_ms = now_ms() + timeout_ms;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return strerror(errno);
	const char *why = join(fd, path, ends_ms);
	if (!why)
		why = converse(fd, request, ends_ms, answer);
	close(fd);
	return why;
}
