/* Prints the addresses of a name, as the C library that it is built with finds them. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

int main(int count, char **words)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found, *each;
	char text[INET6_ADDRSTRLEN];
	int failed;

	if (count != 2)
		return 2;
	failed = getaddrinfo(words[1], NULL, &hints, &found);
	if (failed) {
		fprintf(stderr, "%s\n", gai_strerror(failed));
		return 1;
	}
	for (each = found; each; each = each->ai_next) {
		const void *address = &((struct sockaddr_in *)each->ai_addr)->sin_addr;

		if (each->ai_family == AF_INET6)
			address = &((struct sockaddr_in6 *)each->ai_addr)->sin6_addr;
		puts(inet_ntop(each->ai_family, address, text, sizeof(text)));
	}
	return 0;
}
