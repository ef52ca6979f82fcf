#include "json.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

/* Python refuses longer ones, since reading them takes quadratic time. */
#define MAX_INTEGER_DIGITS 4300

/* --- checking ------------------------------------------------------------------------------------
 * Each of these takes the start of something and returns its end, or NULL if it is not there. The
 * text ends with a zero byte, which is no part of any value: so none looks behind it. */

struct reader {
	const char *end;
	const char *why;
};

static const char *value(struct reader *r, const char *p, int depth);

static const char *blanks(const char *p)
{
	while (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r')
		p++;
	return p;
}

static const char *wrong(struct reader *r, const char *why)
{
	if (!r->why)
		r->why = why;
	return NULL;
}

static bool digit(char c)
{
	return c >= '0' && c <= '9';
}

static int hex(char c)
{
	if (digit(c))
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static const char *string(struct reader *r, const char *p)
{
	for (p++; *p != '"';) {
		if (*p == '\\') {
			p++;
			if (*p == 'u') {
				for (int i = 1; i <= 4; i++)
					if (hex(p[i]) < 0)
						return wrong(r, "a \\u escape has four hexadecimal digits");
				p += 5;
			} else if (*p && strchr("\"\\/bfnrt", *p)) {
				p++;
			} else {
				return wrong(r, "an escape is unknown");
			}
		} else if ((unsigned char)*p < 0x20) {
			return wrong(r, p == r->end ? "a string has no end" : "a control character is in a string");
		} else {
			size_t size = utf8_size(p, r->end);
			if (!size)
				return wrong(r, "it is not UTF-8");
			p += size;
		}
	}
	return p + 1;
}

static const char *number(struct reader *r, const char *p)
{
	const char *start = p;
	bool whole = true;

	if (*p == '-')
		p++;
	const char *digits = p;
	if (!digit(*p))
		return wrong(r, "a value is expected");
	if (*p == '0')
		p++;
	else
		while (digit(*p))
			p++;
	if (p - digits > MAX_INTEGER_DIGITS)
		return wrong(r, "a number has too many digits");
	if (p[0] == '.' && digit(p[1])) {
		whole = false;
		for (p++; digit(*p);)
			p++;
	}
	if ((*p | 0x20) == 'e' && digit(p[1 + (p[1] == '+' || p[1] == '-')])) {
		whole = false;
		for (p += 2; digit(*p);)
			p++;
	}
	if (!whole && isinf(strtod(start, NULL)))
		return wrong(r, "a number is too large");
	return p;
}

static const char *word(struct reader *r, const char *p, const char *expected)
{
	size_t size = strlen(expected);
	return strncmp(p, expected, size) ? wrong(r, "a value is expected") : p + size;
}

static const char *members(struct reader *r, const char *p, int depth)
{
	bool object = *p == '{';
	char last = object ? '}' : ']';

	if (depth >= JSON_MAX_DEPTH)
		return wrong(r, "it is nested too deeply");
	p = blanks(p + 1);
	if (*p == last)
		return p + 1;
	for (;;) {
		if (object) {
			if (*p != '"')
				return wrong(r, "a name in quotes is expected");
			p = string(r, p);
			if (!p)
				return NULL;
			p = blanks(p);
			if (*p != ':')
				return wrong(r, "a colon is expected");
			p = blanks(p + 1);
		}
		p = value(r, p, depth + 1);
		if (!p)
			return NULL;
		p = blanks(p);
		if (*p == last)
			return p + 1;
		if (*p != ',')
			return wrong(r, "a comma or the end of a list or object is expected");
		p = blanks(p + 1);
	}
}

static const char *value(struct reader *r, const char *p, int depth)
{
	switch (*p) {
	case '"':
		return string(r, p);
	case '{':
	case '[':
		return members(r, p, depth);
	case 't':
		return word(r, p, "true");
	case 'f':
		return word(r, p, "false");
	case 'n':
		return word(r, p, "null");
	default:
		return number(r, p);
	}
}

const char *json_parse(const char *text, size_t size, struct json *found)
{
	struct reader r = {.end = text + size};
	const char *start = blanks(text);
	const char *end = value(&r, start, 0);

	if (!end)
		return r.why;
	if (blanks(end) != r.end)
		return "something follows the document";
	*found = (struct json){start, end};
	return NULL;
}

/* --- reading what was checked -------------------------------------------------------------------- */

/* Return the end of a value; depth is counted and not nested, so this takes no stack. */
static const char *past(const char *p)
{
	int depth = 0;

	do {
		if (*p == '"') {
			for (p++; *p != '"'; p++)
				p += *p == '\\';
			p++;
		} else if (*p == '{' || *p == '[') {
			depth++, p++;
		} else if (*p == '}' || *p == ']') {
			depth--, p++;
		} else if (strchr(",: \t\n\r", *p)) {
			p++; /* only inside of something */
		} else {
			p += strcspn(p, ",]} \t\n\r");
		}
	} while (depth);
	return p;
}

bool json_is_object(struct json value)
{
	return *value.at == '{';
}

bool json_is_array(struct json value)
{
	return *value.at == '[';
}

bool json_is_string(struct json value)
{
	return *value.at == '"';
}

bool json_is_empty(struct json value)
{
	const char *cursor = NULL;
	struct json item;

	switch (*value.at) {
	case '{':
	case '[':
		return !json_each(value, &cursor, NULL, &item);
	case '"':
		return value.end - value.at == 2;
	case 'n':
	case 'f':
		return true;
	case 't':
		return false;
	default:
		return strtod(value.at, NULL) == 0;
	}
}

bool json_each(struct json container, const char **cursor, struct json *key, struct json *value)
{
	const char *p = blanks((*cursor ? *cursor : container.at) + 1);

	/* The cursor stands on the bracket or comma in front of the next one, or on the last bracket. */
	if ((*cursor && **cursor != ',') || *p == '}' || *p == ']')
		return false;
	if (*container.at == '{') {
		const char *end = past(p);
		if (key)
			*key = (struct json){p, end};
		p = blanks(blanks(end) + 1);
	}
	*value = (struct json){p, past(p)};
	*cursor = blanks(value->end);
	return true;
}

bool json_member(struct json object, const char *name, struct json *value)
{
	const char *cursor = NULL;
	struct json key, found;
	bool there = false;

	while (json_each(object, &cursor, &key, &found))
		if (json_equals(key, name)) {
			*value = found;
			there = true;
		}
	return there;
}

static uint32_t escaped(const char *p)
{
	return (uint32_t)(hex(p[0]) << 12 | hex(p[1]) << 8 | hex(p[2]) << 4 | hex(p[3]));
}

/* Return the character at *p, and step over it; half of a surrogate pair stays what it is. */
static uint32_t character(const char **p)
{
	if (**p != '\\')
		return utf8_character(p);
	char kind = *++*p;
	if (kind != 'u') {
		const char *control = strchr("b\bf\fn\nr\rt\t", kind);
		++*p;
		return (unsigned char)(control ? control[1] : kind);
	}
	uint32_t high = escaped(*p + 1);
	*p += 5;
	if (high >= 0xd800 && high < 0xdc00 && (*p)[0] == '\\' && (*p)[1] == 'u') {
		uint32_t low = escaped(*p + 2);
		if (low >= 0xdc00 && low < 0xe000) {
			*p += 6;
			return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
		}
	}
	return high;
}

bool json_equals(struct json string, const char *ascii)
{
	if (!json_is_string(string))
		return false;
	const char *p = string.at + 1;
	while (p < string.end - 1 && *ascii)
		if (character(&p) != (unsigned char)*ascii++)
			return false;
	return p == string.end - 1 && !*ascii;
}

bool json_contains(struct json string, char ascii)
{
	if (!json_is_string(string))
		return false;
	for (const char *p = string.at + 1; p < string.end - 1;)
		if (character(&p) == (unsigned char)ascii)
			return true;
	return false;
}

bool json_positive(struct json value, int *number)
{
	size_t size = (size_t)(value.end - value.at);

	if (size > 10 || strspn(value.at, "0123456789") != size)
		return false;
	long found = strtol(value.at, NULL, 10);
	if (found < 1 || found > INT32_MAX)
		return false;
	*number = (int)found;
	return true;
}

bool json_bytes(struct json string, char *bytes, size_t room)
{
	const char *p = string.at + 1;
	bool fits = true;

	while (fits && p < string.end - 1) {
		char encoded[4];
		size_t size = utf8_encode(character(&p), encoded);
		fits = size && encoded[0] && size < room;
		if (fits) {
			memcpy(bytes, encoded, size);
			bytes += size;
			room -= size;
		}
	}
	*bytes = 0;
	return fits;
}

void json_put(struct text *out, struct json value)
{
	text_bytes(out, value.at, (size_t)(value.end - value.at));
}
