#include "utf8.h"

size_t utf8_size(const char *p, const char *end)
{
	const unsigned char *b = (const unsigned char *)p;
	size_t room = (size_t)(end - p);
	unsigned char low = 0x80, high = 0xbf; /* what the second byte may be */
	size_t size;

	if (!room)
		return 0;
	if (b[0] < 0x80)
		return 1;
	if (b[0] < 0xc2 || b[0] > 0xf4)
		return 0;
	size = b[0] < 0xe0 ? 2 : b[0] < 0xf0 ? 3 : 4;
	if (b[0] == 0xe0)
		low = 0xa0;
	if (b[0] == 0xed)
		high = 0x9f;
	if (b[0] == 0xf0)
		low = 0x90;
	if (b[0] == 0xf4)
		high = 0x8f;
	if (room < size || b[1] < low || b[1] > high)
		return 0;
	for (size_t i = 2; i < size; i++)
		if ((b[i] & 0xc0) != 0x80)
			return 0;
	return size;
}

uint32_t utf8_character(const char **p)
{
	const unsigned char *b = (const unsigned char *)*p;
	uint32_t c = b[0];
	int more = c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;

	if (more)
		c &= 0x3fu >> more;
	for (int i = 1; i <= more; i++)
		c = c << 6 | (b[i] & 0x3f);
	*p += 1 + more;
	return c;
}

size_t utf8_encode(uint32_t c, char *bytes)
{
	if (c >= 0xdc80 && c <= 0xdcff) {
		bytes[0] = (char)(c - 0xdc00);
		return 1;
	}
	if (c >= 0xd800 && c < 0xe000)
		return 0;
	if (c < 0x80) {
		bytes[0] = (char)c;
		return 1;
	}
	size_t size = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
	for (size_t i = size - 1; i; i--, c >>= 6)
		bytes[i] = (char)(0x80 | (c & 0x3f));
	bytes[0] = (char)((0xff00u >> size & 0xff) | c);
	return size;
}
