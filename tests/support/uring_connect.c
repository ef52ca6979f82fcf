/* Connects to ADDRESS PORT through io_uring, by a worker of the kernel if FORCED, and prints what
 * it is told. */
#include <arpa/inet.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void *ring(int fd, off_t which, size_t size)
{
	void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, which);

	if (found == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	return found;
}

int main(int count, char **words)
{
	struct io_uring_params p = { 0 };
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct io_uring_sqe *entry;
	struct io_uring_cqe *done;
	char *asked, *answered, text[256];
	int fd, made, got;

	if (count != 4)
		return 2;
	fd = syscall(__NR_io_uring_setup, 1, &p);
	if (fd < 0) {
		perror("io_uring_setup");
		return 1;
	}
	asked = ring(fd, IORING_OFF_SQ_RING, p.sq_off.array + p.sq_entries * sizeof(unsigned));
	answered = ring(fd, IORING_OFF_CQ_RING, p.cq_off.cqes + p.cq_entries * sizeof(*done));
	entry = ring(fd, IORING_OFF_SQES, p.sq_entries * sizeof(*entry));
	inet_pton(AF_INET, words[1], &to.sin_addr);
	to.sin_port = htons(atoi(words[2]));
	made = socket(AF_INET, SOCK_STREAM, 0);
	entry->opcode = IORING_OP_CONNECT;
	entry->fd = made;
	entry->addr = (unsigned long)&to;
	entry->off = sizeof(to);
	entry->flags = atoi(words[3]) ? IOSQE_ASYNC : 0;
	*(unsigned *)(asked + p.sq_off.array) = 0;
	__atomic_store_n((unsigned *)(asked + p.sq_off.tail), 1, __ATOMIC_RELEASE);
	if (syscall(__NR_io_uring_enter, fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1) {
		perror("io_uring_enter");
		return 1;
	}
	done = (struct io_uring_cqe *)(answered + p.cq_off.cqes);
	if (done->res) {
		fprintf(stderr, "connect: %s\n", strerror(-done->res));
		return 1;
	}
	got = read(made, text, sizeof(text));
	return write(STDOUT_FILENO, text, got > 0 ? got : 0) < 0;
}
