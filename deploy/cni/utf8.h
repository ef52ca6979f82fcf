/* UTF-8 as RFC 3629 has it: shortest forms only, no surrogates, nothing above U+10FFFF. */

#ifndef UTF8_H
#define UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Return how many bytes the character at `p` takes, or 0 if none is there. */
size_t utf8_size(const char *p, const char *end);

/* Return the character at *p, which must be one, and step over it. */
uint32_t utf8_character(const char **p);

/* Write a character and return its size. 0 is returned for half of a surrogate pair, but for those
 * that stand for a byte that is no UTF-8: Python writes such a byte so in a string, and reads it. */
size_t utf8_encode(uint32_t character, char *bytes);

#endif
