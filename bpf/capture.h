/* What is known of a captured namespace, and how it is asked. agent/formats/bpf_capture.py writes
 * the entries of `captures`; whoever changes a layout here changes LAYOUT there too.
 *
 * Every address is of 16 bytes, IPv4 as ::ffff:a.b.c.d, so that there is one way through the code.
 * Ports are in host order. */
#pragma once

#include "bpf.h"

#define MAX_SPANS 64
#define MAX_NETWORKS 64
#define MAX_SERVERS 16
#define MAX_PLACES 64
#define MAX_OWN 16384
#define MAX_NAMESPACES 4096
#define MAX_GROUPS (2 * MAX_NAMESPACES) /* cgroups for which a gate is open */
#define MAX_PATH 512
#define MAX_DEPTH 16 /* of a cgroup */

/* Members of one SO_REUSEPORT group that are remembered; each leads to the whole group, and leaves
 * its slot when it closes. A proxy that restarts has two processes with a listener a thread each, and
 * either may be the one that stays. A group that fills the slots takes others' over. */
#define SLOTS 8

enum {
	CAPTURE_IPV6 = 1 << 0,
	INBOUND_ALL = 1 << 1,	    /* inbound_ports are those that are left out */
	OUTBOUND_ALL = 1 << 2,	    /* every network is included */
	GROUPS_ALL = 1 << 3,	    /* groups are those that are left out */
	DNS = 1 << 4,		    /* DNS is captured, of `servers` */
	DNS_ALL = 1 << 5,	    /* or of any server */
	LOOPBACK_INCLUDED = 1 << 6, /* a loopback network is among those included */
	GATE_OPEN = 1 << 7,	    /* nothing is captured before the proxy has listened once */
	GATE_LISTENER = 1 << 8,	    /* nor is what the processes of `passing` send */
};

struct address {
	__u32 word[4];
};

struct span {
	__u32 first, last;
};

struct spans {
	__u32 count;
	struct span of[MAX_SPANS];
};

/* A bit for each port. */
struct ports {
	__u32 word[65536 / 32];
};

/* Ids of a user namespace, `count` of them from `inside` on, and which they are outside. */
struct id_range {
	__u32 inside, outside, count;
};

struct network {
	struct address address, mask;
};

struct networks {
	__u32 count;
	struct network of[MAX_NETWORKS];
};

/* A destination as the namespace's routes see it: what address one has towards it, and whether it
 * is the namespace itself. Longer prefixes come first. */
struct place {
	struct network where;
	struct address source;
	__u32 local;
};

struct capture {
	__u32 flags;
	__u16 proxy_port, inbound_port, tunnel_port, dns_port;
	struct id_range user_ids, group_ids; /* count 0: all ids are the node's own */
	struct spans proxy_uid, proxy_gid, groups;
	struct spans outbound_ports_exclude, outbound_ports_include;
	struct ports inbound_ports;
	struct network loopback;
	struct networks exclude, include;
	__u32 server_count;
	struct address servers[MAX_SERVERS];
	__u32 place_count;
	struct place places[MAX_PLACES];
};
_Static_assert(sizeof(struct capture) == 18536, "agent/formats/bpf_capture.py packs this");

/* An address and port as somebody dialled them. */
struct original {
	struct address address;
	__u32 port;
	__u32 turned_to; /* the port of the proxy that it was given instead */
};

struct connection {
	__u64 netns;
	struct address from, to;
	__u32 from_port, to_port;
};

struct listener {
	__u64 netns;
	__u32 port;
	__u16 family, slot;
};

/* Of `places`, a single address of the namespace, without loopback. */
struct own {
	__u64 netns;
	struct address address;
};

struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_HASH);
	MAP_NUMBER(max_entries, MAX_NAMESPACES);
	MAP_NUMBER(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, __u64);
	MAP_TYPE(value, struct capture);
} captures SEC(".maps");

struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_SOCKHASH);
	MAP_NUMBER(max_entries, MAX_NAMESPACES * 8);
	MAP_TYPE(key, struct listener);
	MAP_TYPE(value, __u64);
} listeners SEC(".maps");

struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_HASH);
	MAP_NUMBER(max_entries, MAX_OWN);
	MAP_NUMBER(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, struct own);
	MAP_TYPE(value, __u32);
} own_addresses SEC(".maps");

/* Namespaces in which the proxy has listened, be it once: a gate there is closed for good. Room is
 * there from the start, since a proxy that listens must not find none. */
struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_HASH);
	MAP_NUMBER(max_entries, MAX_NAMESPACES);
	MAP_TYPE(key, __u64);
	MAP_TYPE(value, __u32);
} listened SEC(".maps");

/* Whether nothing at all is captured yet. */
inline_always int is_open(const struct capture *c, __u64 netns)
{
	return c->flags & GATE_OPEN && !bpf_map_lookup_elem(&listened, &netns);
}

inline_always void set_ipv4(struct address *out, __u32 ipv4)
{
	out->word[0] = 0;
	out->word[1] = 0;
	out->word[2] = net32(0xffff);
	out->word[3] = ipv4;
}

inline_always int is_ipv4(const struct address *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == net32(0xffff);
}

inline_always int is_set(const struct address *a)
{
	return (a->word[0] | a->word[1] | a->word[2] | a->word[3]) != 0;
}

inline_always int same(const struct address *a, const struct address *b)
{
	return !((a->word[0] ^ b->word[0]) | (a->word[1] ^ b->word[1]) |
		 (a->word[2] ^ b->word[2]) | (a->word[3] ^ b->word[3]));
}

inline_always int is_ipv6_loopback(const struct address *a)
{
	return !a->word[0] && !a->word[1] && !a->word[2] && a->word[3] == net32(1);
}

/* 127.0.0.6 and ::6, from which the proxy passes inbound traffic on. */
inline_always int is_passthrough(const struct address *a)
{
	if (is_ipv4(a))
		return a->word[3] == net32(0x7f000006);
	return !a->word[0] && !a->word[1] && !a->word[2] && a->word[3] == net32(6);
}

/* A network of IPv6 that is wide enough to hold the mapped addresses holds no IPv4 all the same. */
inline_always int within(const struct network *n, const struct address *a)
{
	__u32 four = is_ipv4(a) ? 0xffffffff : 0;

	return !((four & ~n->mask.word[2]) |
		 ((a->word[0] ^ n->address.word[0]) & n->mask.word[0]) |
		 ((a->word[1] ^ n->address.word[1]) & n->mask.word[1]) |
		 ((a->word[2] ^ n->address.word[2]) & n->mask.word[2]) |
		 ((a->word[3] ^ n->address.word[3]) & n->mask.word[3]));
}

/* The loops. SEPARATE is for a program with many of them: it makes functions that the verifier looks
 * at once each, and not once for every way that leads to a call (more than a million steps). */
#ifdef SEPARATE
#define LOOP __attribute__((noinline))
#else
#define LOOP inline_always
#endif

LOOP int any_span(const struct spans *s, __u32 number)
{
	if (!s)
		return 0;
	for (int i = 0; i < MAX_SPANS; i++) {
		if (i >= s->count)
			return 0;
		if (number >= s->of[i].first && number <= s->of[i].last)
			return 1;
	}
	return 0;
}

LOOP int any_network(const struct networks *n, const struct address *a)
{
	if (!n || !a)
		return 0;
	for (int i = 0; i < MAX_NETWORKS; i++) {
		if (i >= n->count)
			return 0;
		if (within(&n->of[i], a))
			return 1;
	}
	return 0;
}

/* Return the index of the first place that the address is in, or MAX_PLACES. */
LOOP int place_of(const struct capture *c, const struct address *a)
{
	if (!c || !a)
		return MAX_PLACES;
	for (int i = 0; i < MAX_PLACES; i++) {
		if (i >= c->place_count)
			return MAX_PLACES;
		if (within(&c->places[i].where, a))
			return i;
	}
	return MAX_PLACES;
}

/* Context fields are read at constant offsets only: clang likes to merge the reads of two families
 * behind one computed pointer, and the verifier answers "dereference of modified ctx ptr". So both
 * are read, and hidden from the optimiser. */
#define READ_ADDRESS(out, ctx, family, ipv4, ipv6)                                       \
	do {                                                                              \
		__u32 v4_ = (ctx)->ipv4, a_ = (ctx)->ipv6[0], b_ = (ctx)->ipv6[1];        \
		__u32 c_ = (ctx)->ipv6[2], d_ = (ctx)->ipv6[3];                           \
		asm volatile("" : "+r"(v4_), "+r"(a_), "+r"(b_), "+r"(c_), "+r"(d_));     \
		if ((family) == AF_INET) {                                                \
			set_ipv4(&(out), v4_);                                            \
		} else {                                                                  \
			(out).word[0] = a_;                                               \
			(out).word[1] = b_;                                               \
			(out).word[2] = c_;                                               \
			(out).word[3] = d_;                                               \
		}                                                                         \
	} while (0)
