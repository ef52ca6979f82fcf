#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "utf8.h"

static _Noreturn void no_memory(void)
{
	static const char said[] = "{\"cniVersion\": \"1.1.0\", \"code\": 999, \"details\": \"\", "
				   "\"msg\": \"intercept-cni has no memory left\"}";

	_exit(write(1, said, sizeof said - 1) > 0 ? 1 : 2);
}

void text_bytes(struct text *text, const char *bytes, size_t size)
{
	if (text->room - text->size < size) {
		text->room = (text->size + size) * 2;
		text->at = realloc(text->at, text->room);
		if (!text->at)
			no_memory();
	}
	if (size)
		memcpy(text->at + text->size, bytes, size);
	text->size += size;
}

void text_add(struct text *text, ...)
{
	va_list pieces;

	va_start(pieces, text);
	for (const char *piece; (piece = va_arg(pieces, const char *));)
		text_bytes(text, piece, strlen(piece));
	va_end(pieces);
}

void text_quoted(struct text *text, const char *bytes, size_t size)
{
	const char *end = bytes + size;

	text_bytes(text, "\"", 1);
	while (bytes < end) {
		unsigned char c = (unsigned char)*bytes;
		size_t length = utf8_size(bytes, end);
		char escape[8];

		if (!length || c < 0x20) {
			snprintf(escape, sizeof escape, "\\u%s%02x", length ? "00" : "dc", c);
			text_bytes(text, escape, 6);
			length = 1;
		} else {
			if (c == '"' || c == '\\')
				text_bytes(text, "\\", 1);
			text_bytes(text, bytes, length);
		}
		bytes += length;
	}
	text_bytes(text, "\"", 1);
}
