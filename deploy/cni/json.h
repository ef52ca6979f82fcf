/* JSON that is checked once and then read in place: nothing is copied and nothing is allocated.
 *
 * What passes `json_parse` is what Python's json module takes in strict mode, so that both programs
 * named intercept-cni accept the same documents: numbers and strings keep the bytes that they have. */

#ifndef JSON_H
#define JSON_H

#include <stdbool.h>
#include <stddef.h>

#include "text.h"

/* Below what Python can nest (1,000 levels, less those of its callers). */
#define JSON_MAX_DEPTH 900

/* One value of a checked text, without the blanks around it. */
struct json {
	const char *at, *end;
};

/* Check a whole text, which must have a zero byte behind its end. Returns NULL and the value, or in
 * words what is wrong with it. */
const char *json_parse(const char *text, size_t size, struct json *value);

bool json_is_object(struct json value);
bool json_is_array(struct json value);
bool json_is_string(struct json value);

/* What Python calls false: null, false, 0, "", [] and {}. */
bool json_is_empty(struct json value);

/* Step through an object or an array: `*cursor` is NULL at first. `key` may be NULL, and is not set
 * in an array. Returns false behind the last one. */
bool json_each(struct json container, const char **cursor, struct json *key, struct json *value);

/* Find a member of an object, the last one if its name comes twice. */
bool json_member(struct json object, const char *name, struct json *value);

/* Compare a string, whose characters may be escaped, with plain ASCII. */
bool json_equals(struct json string, const char *ascii);
bool json_contains(struct json string, char ascii);

/* Read a whole number from 1 to 2147483647. */
bool json_positive(struct json value, int *number);

/* Write a string's bytes and a zero byte. Returns false, with the bytes so far, if there are more than
 * fit, if a zero byte is among them, or if a character has no bytes (half of a surrogate pair). */
bool json_bytes(struct json string, char *bytes, size_t room);

/* Put a value as it stands there. */
void json_put(struct text *out, struct json value);

#endif
