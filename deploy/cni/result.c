#include "result.h"

static void put_member(struct text *out, struct json key, struct json value)
{
	text_add(out, out->at[out->size - 1] == '{' ? "" : ", ", NULL);
	json_put(out, key);
	text_add(out, ": ", NULL);
	json_put(out, value);
}

/* Put an address as the version has it: until 0.4.0 each names its family. */
static void put_address(struct text *out, struct json ip, const char *version)
{
	const char *cursor = NULL;
	struct json key, value;

	if (!json_is_object(ip)) {
		json_put(out, ip);
		return;
	}
	text_add(out, "{", NULL);
	if (*version == '0') {
		bool six = json_member(ip, "address", &value) && json_contains(value, ':');
		text_add(out, "\"version\": \"", six ? "6" : "4", "\"", NULL);
	}
	while (json_each(ip, &cursor, &key, &value))
		if (!json_equals(key, "version"))
			put_member(out, key, value);
	text_add(out, "}", NULL);
}

static void put_addresses(struct text *out, struct json ips, const char *version)
{
	const char *cursor = NULL;
	struct json ip;

	text_add(out, ", \"ips\": [", NULL);
	for (bool first = true; json_each(ips, &cursor, NULL, &ip); first = false) {
		text_add(out, first ? "" : ", ", NULL);
		put_address(out, ip, version);
	}
	text_add(out, "]", NULL);
}

void result_put(struct text *out, struct json result, const char *version)
{
	const char *cursor = NULL;
	struct json key, value, ips;

	if (json_member(result, "cniVersion", &value) && json_equals(value, version)) {
		json_put(out, result);
		return;
	}
	bool listed = json_member(result, "ips", &ips) && json_is_array(ips);
	text_add(out, "{\"cniVersion\": \"", version, "\"", NULL);
	while (json_each(result, &cursor, &key, &value))
		if (!json_equals(key, "cniVersion") && !(listed && json_equals(key, "ips")))
			put_member(out, key, value);
	if (listed)
		put_addresses(out, ips, version);
	text_add(out, "}", NULL);
}
