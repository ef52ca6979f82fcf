/* The agent's socket: one request, one answer. Both are a length of four bytes, the version of the
 * protocol, and a document, as agent/cni/frames.py has them. */

#ifndef DOOR_H
#define DOOR_H

#include "text.h"

/* Send a request and receive the answer, with a zero byte behind it, within a time. Returns NULL, or
 * in words why there is no answer. */
const char *door_ask(const char *path, const struct text *request, long timeout_ms,
		     struct text *answer);

#endif
