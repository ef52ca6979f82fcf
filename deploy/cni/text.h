/* A text that grows. There is one end to running out of memory: the call fails with a CNI error. */

#ifndef TEXT_H
#define TEXT_H

#include <stddef.h>

struct text {
	char *at;
	size_t size, room;
};

void text_bytes(struct text *text, const char *bytes, size_t size);

/* Put strings one after the other; the last argument is NULL. */
void text_add(struct text *text, ...) __attribute__((sentinel));

/* Put bytes as a JSON string, in quotes. A byte that is no UTF-8 becomes the escape that Python
 * gives it, \udc80 to \udcff. */
void text_quoted(struct text *text, const char *bytes, size_t size);

#endif
