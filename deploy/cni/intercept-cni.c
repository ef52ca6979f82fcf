/* The chained CNI plugin for nodes that have no Python: agent/cni/plugin.py once more, in C.
 *
 * It holds no credential and decides nothing: it forwards the call to the node's agent and prints
 * prevResult if the agent says yes. Where no agent answers, a pod that was not injected starts, and a
 * mesh pod is refused rather than started without its capture. tests/unit/test_cni_plugin.py holds
 * both programs to the same.
 *
 * One call is one process, so whatever ends the call ends the process: `refuse` and `print` do not
 * return. Built without a dependency and linked statically, it runs on every node of its
 * architecture. */

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "door.h"
#include "json.h"
#include "result.h"
#include "text.h"

#define MAX_STDIN_BYTES (2 * 1024 * 1024)
#define SHOWN_BYTES 200
#define DEFAULT_SOCKET "/run/intercept-agent/agent.sock"
#define ANNOTATIONS "io.kubernetes.cri.pod-annotations"
#define INJECTED "sidecar.istio.io/status"
#define NEWEST "1.1.0"

/* Runtimes wait for a plugin without a limit of their own; the kubelet gives up after some minutes.
 * A pod must be able to end, also beside an agent that hangs. */
#ifndef TIMEOUT_MS
#define TIMEOUT_MS 60000
#endif
#ifndef DEL_TIMEOUT_MS
#define DEL_TIMEOUT_MS 10000
#endif

/* Error codes of the CNI specification. */
enum {
	BAD_VERSION = 1,
	BAD_ENVIRONMENT = 4,
	BAD_IO = 5,
	BAD_CONTENT = 6,
	BAD_CONFIG = 7,
	TRY_LATER = 11,
	NOT_AVAILABLE = 50,
};

static const char *const versions[] = {"0.3.0", "0.3.1", "0.4.0", "1.0.0", NEWEST};
#define VERSIONS (sizeof versions / sizeof *versions)

static const struct {
	const char *name;
	size_t since; /* index in versions */
} verbs[] = {{"ADD", 0}, {"DEL", 0}, {"CHECK", 2}, {"GC", 4}, {"STATUS", 4}};

/* Istio's injector passes these over, whatever their labels. */
static const char *const never_injected[] = {"kube-system", "kube-public", "kube-node-lease",
					     "local-path-storage"};

static const char *verb;
static const char *version = NEWEST; /* that of the configuration, once it is known */
static char input[MAX_STDIN_BYTES + 2];

static bool is(const char *expected)
{
	return !strcmp(verb, expected);
}

static const char *variable(const char *name)
{
	const char *value = getenv(name);
	return value ? value : "";
}

/* --- how a call ends ------------------------------------------------------------------------------ */

static void warn(const char *what, const char *why, size_t size)
{
	struct text line = {0};

	text_add(&line, "intercept-cni: ", what, NULL);
	text_bytes(&line, why, size);
	text_bytes(&line, "\n", 1);
	if (write(2, line.at, line.size) < 0)
		return; /* nobody hears it */
}

static _Noreturn void print(const struct text *document, int status)
{
	const char *p = document->at;

	for (size_t left = document->size; left;) {
		ssize_t written = write(1, p, left);
		if (written < 0 && errno != EINTR) {
			const char *why = strerror(errno);
			warn("the result cannot be printed: ", why, strlen(why));
			exit(1);
		}
		if (written > 0) {
			p += written;
			left -= (size_t)written;
		}
	}
	exit(status);
}

static _Noreturn void print_versions(void)
{
	struct text out = {0};

	text_add(&out, "{\"cniVersion\": \"", version, "\", \"supportedVersions\": [", NULL);
	for (size_t i = 0; i < VERSIONS; i++)
		text_add(&out, i ? ", \"" : "\"", versions[i], "\"", NULL);
	text_add(&out, "]}", NULL);
	print(&out, 0);
}

/* Print a CNI error; the message is a JSON string. */
static _Noreturn void refuse_quoted(int code, struct json message, struct json shown)
{
	struct text out = {0};
	char number[16];

	snprintf(number, sizeof number, "%d", code);
	text_add(&out, "{\"cniVersion\": \"", version, "\", \"code\": ", number, ", \"msg\": ", NULL);
	text_bytes(&out, message.at, (size_t)(message.end - message.at));
	text_add(&out, ", \"details\": ", NULL);
	size_t size = (size_t)(shown.end - shown.at);
	text_quoted(&out, shown.at, size < SHOWN_BYTES ? size : SHOWN_BYTES);
	text_add(&out, "}", NULL);
	print(&out, 1);
}

/* End a call that cannot be done. A pod must be able to end whatever is wrong, and the versions are
 * told also to who gives no configuration. */
static _Noreturn void refuse_text(int code, const struct text *message)
{
	struct text quoted = {0};

	if (is("DEL")) {
		warn("DEL goes on without the agent: ", message->at, message->size);
		exit(0);
	}
	if (is("VERSION"))
		print_versions();
	text_quoted(&quoted, message->at, message->size);
	refuse_quoted(code, (struct json){quoted.at, quoted.at + quoted.size}, (struct json){0});
}

#define refuse(code, ...)                                                                           \
	do {                                                                                        \
		struct text sentence = {0};                                                         \
		text_add(&sentence, __VA_ARGS__, NULL);                                             \
		refuse_text(code, &sentence);                                                       \
	} while (0)

/* --- what the runtime says ------------------------------------------------------------------------ */

static size_t read_input(void)
{
	size_t size = 0;

	while (size <= MAX_STDIN_BYTES) {
		ssize_t got = read(0, input + size, MAX_STDIN_BYTES + 1 - size);
		if (!got)
			break;
		if (got > 0)
			size += (size_t)got;
		else if (errno != EINTR && (is("DEL") || is("VERSION")))
			break;
		else if (errno != EINTR)
			refuse(BAD_IO, "stdin cannot be read: ", strerror(errno));
	}
	return size;
}

/* Return the configuration, and set `version` to what it asks for. */
static struct json configuration(size_t size)
{
	struct json config, asked;

	if (size > MAX_STDIN_BYTES)
		refuse(BAD_CONTENT, "the configuration is larger than 2097152 bytes");
	input[size] = 0;
	const char *why = json_parse(input, size, &config);
	if (why)
		refuse(BAD_CONTENT, "the configuration on stdin is not JSON: ", why);
	if (!json_is_object(config))
		refuse(BAD_CONTENT, "the configuration on stdin is not a JSON object");
	if (json_member(config, "cniVersion", &asked))
		for (size_t i = 0; i < VERSIONS; i++)
			if (json_equals(asked, versions[i])) {
				version = versions[i];
				return config;
			}
	refuse(BAD_VERSION, "cniVersion is none of 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0");
}

/* Return the oldest version that has the verb, as an index. */
static size_t since(void)
{
	for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
		if (is(verbs[i].name))
			return verbs[i].since;
	refuse(BAD_ENVIRONMENT, "CNI_COMMAND '", verb, "' is not a CNI verb");
}

static void require_version(size_t oldest)
{
	size_t i = 0;

	while (strcmp(versions[i], version))
		i++;
	if (i < oldest)
		refuse(BAD_VERSION, "cniVersion ", version, " has no ", verb);
}

static void require_variables(void)
{
	static const char *const required[] = {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"};
	struct text missing = {0};

	for (size_t i = 0; i < sizeof required / sizeof *required; i++)
		if (!*variable(required[i]))
			text_add(&missing, missing.size ? ", " : "the runtime did not set ", required[i],
				 NULL);
	if (missing.size)
		refuse_text(BAD_ENVIRONMENT, &missing);
}

static struct json previous_result(struct json config)
{
	struct json result;

	if (!json_member(config, "prevResult", &result) || !json_is_object(result))
		refuse(BAD_CONFIG, "there is no prevResult: intercept-cni must be chained behind a "
				   "plugin that makes the network");
	return result;
}

/* --- what the agent says -------------------------------------------------------------------------- */

/* Write the path of the agent's socket; returns false if nobody can listen on such a path. */
static bool socket_path(struct json config, char *bytes, size_t room)
{
	struct json path;

	snprintf(bytes, room, DEFAULT_SOCKET);
	if (!json_member(config, "socket", &path) || json_is_empty(path))
		return true;
	*bytes = 0;
	bool whole = json_is_string(path) && json_bytes(path, bytes, room);
	if (*bytes != '/')
		refuse(BAD_CONFIG, "socket is not an absolute path");
	return whole;
}

static void put_request(struct text *out, struct json config)
{
	static const char *const names[] = {"CONTAINERID", "NETNS", "IFNAME",
					    "ARGS",	   "PATH",  "NETNS_OVERRIDE"};

	text_add(out, "{\"do\": \"cni\", \"command\": \"", verb, "\", \"environment\": {", NULL);
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		char name[32];
		snprintf(name, sizeof name, "CNI_%s", names[i]);
		text_add(out, i ? ", \"" : "\"", names[i], "\": ", NULL);
		text_quoted(out, variable(name), strlen(variable(name)));
	}
	text_add(out, "}, \"config\": ", NULL);
	json_put(out, config);
	text_add(out, "}", NULL);
}

static bool may_need_capture(struct json config)
{
	struct json runtime, annotations, found;
	const char *item = variable("CNI_ARGS");

	if (json_member(config, "runtimeConfig", &runtime) && json_is_object(runtime) &&
	    json_member(runtime, ANNOTATIONS, &annotations)) {
		if (*annotations.at == 'n') /* null is what containerd makes of a pod that has none */
			return false;
		return !json_is_object(annotations) || json_member(annotations, INJECTED, &found);
	}
	for (size_t size; *item; item += size + (item[size] == ';')) {
		static const char key[] = "K8S_POD_NAMESPACE=";
		size = strcspn(item, ";");
		for (size_t i = 0; i < sizeof never_injected / sizeof *never_injected; i++)
			if (size == sizeof key - 1 + strlen(never_injected[i]) &&
			    !strncmp(item, key, sizeof key - 1) &&
			    !strncmp(item + sizeof key - 1, never_injected[i], size - sizeof key + 1))
				return false;
	}
	return true;
}

/* Let the call succeed, or refuse it where that could let traffic pass its proxy by. */
static void without_agent(struct json config, const char *path, const char *why)
{
	struct json policy;
	struct text said = {0};

	text_add(&said, "no intercept-agent answers on ", path, " (", why, ")", NULL);
	if (is("CHECK")) {
		text_add(&said, "; nothing was checked", NULL);
		refuse_text(TRY_LATER, &said);
	}
	if (is("DEL"))
		refuse_text(TRY_LATER, &said);
	if (is("GC") || (json_member(config, "failurePolicy", &policy) && json_equals(policy, "open")))
		return;
	if (is("STATUS"))
		refuse_text(NOT_AVAILABLE, &said);
	if (!may_need_capture(config))
		return;
	text_add(&said,
		 ", so the traffic of this pod cannot be captured; it starts when the agent is back "
		 "(see `intercept-agent status` on the node)",
		 NULL);
	refuse_text(TRY_LATER, &said);
}

/* Return if the agent says yes; anything but a plain yes is a no. */
static void require_yes(struct json reply)
{
	struct json result, said, message, number;
	int code = TRY_LATER;
	bool understood = false;

	if (json_is_object(reply)) {
		bool has = json_member(reply, "result", &result) && json_is_object(result);
		if (has && json_is_empty(result))
			return;
		understood = json_member(has ? result : reply, "error", &said) &&
			     json_is_object(said) && json_member(said, "message", &message) &&
			     json_is_string(message);
	}
	if (!understood) {
		static const char words[] = "\"the agent's answer is not understood\"";
		message = (struct json){words, words + sizeof words - 1};
	} else if (json_member(said, "code", &number) && !json_positive(number, &code)) {
		code = TRY_LATER;
	}
	if (is("DEL"))
		exit(0);
	refuse_quoted(code, message, understood ? (struct json){0} : reply);
}

static void ask(struct json config)
{
	char path[4096];
	struct text request = {0}, answer = {0};
	struct json reply;
	const char *why = "no socket can have this path";

	if (socket_path(config, path, sizeof path)) {
		put_request(&request, config);
		why = door_ask(path, &request, is("DEL") ? DEL_TIMEOUT_MS : TIMEOUT_MS, &answer);
	}
	if (!why)
		why = json_parse(answer.at, answer.size, &reply);
	if (why)
		without_agent(config, path, why);
	else
		require_yes(reply);
}

int main(void)
{
	struct json result = {0};
	struct text out = {0};

	signal(SIGPIPE, SIG_IGN);
	verb = variable("CNI_COMMAND");
	size_t size = read_input();
	if (is("VERSION")) {
		configuration(size);
		print_versions();
	}
	size_t oldest = since();
	struct json config = configuration(size);
	require_version(oldest);
	if (is("ADD") || is("CHECK")) {
		require_variables();
		result = previous_result(config);
	}
	ask(config);
	if (is("ADD"))
		result_put(&out, result, version);
	print(&out, 0);
}
