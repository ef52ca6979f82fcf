/* The result of an earlier plugin, which a chained one passes on. */

#ifndef RESULT_H
#define RESULT_H

#include "json.h"
#include "text.h"

/* Put a result as the version has it: byte for byte if it is of that version, and otherwise with the
 * version and the addresses changed. */
void result_put(struct text *out, struct json result, const char *version);

#endif
