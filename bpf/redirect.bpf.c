/* The redirect of what processes send: programs at the root of cgroup2, for every process of the
 * node. They ask first whether its network namespace is captured, and leave all others alone.
 *
 * connect() is turned towards the proxy, and the socket remembers where it meant to go. Its source
 * port is not known yet then; when it is, just before the SYN leaves, the destination is published
 * under it (TCP_CONNECT), and the proxy's end takes it over before anybody can accept() it
 * (PASSIVE_ESTABLISHED). Nothing stays behind that could be given to a wrong connection. */
#define SEPARATE
#include "capture.h"

struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_LRU_HASH);
	MAP_NUMBER(max_entries, 65536);
	MAP_TYPE(key, struct connection);
	MAP_TYPE(value, struct original);
} handshakes SEC(".maps");

/* Where a socket of an application believes that it talks to. */
struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_SK_STORAGE);
	MAP_NUMBER(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, int);
	MAP_TYPE(value, struct original);
} dialled SEC(".maps");

/* Where a connection that the proxy accepted was meant to go. */
struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_SK_STORAGE);
	MAP_NUMBER(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, int);
	MAP_TYPE(value, struct original);
} accepted SEC(".maps");

/* Whose processes a gate lets pass, and the path of that cgroup, which is for people. */
struct group {
	__u64 netns, cgroup;
};

struct path {
	char text[MAX_PATH];
};

struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_HASH);
	MAP_NUMBER(max_entries, MAX_GROUPS);
	MAP_NUMBER(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, struct group);
	MAP_TYPE(value, struct path);
} passing SEC(".maps");

/* What is loaded; agent/formats/bpf_capture.py knows the fields. */
struct about {
	__u32 layout;
	__u8 build[20];
};

struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_ARRAY);
	MAP_NUMBER(max_entries, 1);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct about);
} about SEC(".maps");

inline_always struct capture *capture_of(void *ctx)
{
	__u64 netns = bpf_get_netns_cookie(ctx);

	return bpf_map_lookup_elem(&captures, &netns);
}

/* Whether the proxy has not listened yet and the calling process need not wait for that. */
static __attribute__((noinline)) int may_pass(const struct capture *c, __u64 netns)
{
	struct group key = { .netns = netns };

	if (!c || bpf_map_lookup_elem(&listened, &netns))
		return 0;
	if (c->flags & GATE_OPEN)
		return 1;
	for (int level = 1; level < MAX_DEPTH; level++) {
		key.cgroup = bpf_get_current_ancestor_cgroup_id(level);
		if (!key.cgroup)
			return 0;
		if (bpf_map_lookup_elem(&passing, &key))
			return 1;
	}
	return 0;
}

inline_always int passes(void *ctx, const struct capture *c)
{
	return c->flags & (GATE_OPEN | GATE_LISTENER) && may_pass(c, bpf_get_netns_cookie(ctx));
}

/* Return an id as the pod's user namespace has it; one that it does not know is nobody's. */
inline_always __u32 as_inside(const struct id_range *r, __u32 id)
{
	if (!r->count)
		return id;
	return id - r->outside < r->count ? r->inside + (id - r->outside) : 0xffffffff;
}

/* The real ids of the calling process, as the settings mean them. */
inline_always void caller(const struct capture *c, __u32 *uid, __u32 *gid)
{
	__u64 ids = bpf_get_current_uid_gid();

	*uid = as_inside(&c->user_ids, ids);
	*gid = as_inside(&c->group_ids, ids >> 32);
}

inline_always int is_proxy(const struct capture *c)
{
	__u32 uid, gid;

	caller(c, &uid, &gid);
	return any_span(&c->proxy_uid, uid) || any_span(&c->proxy_gid, gid);
}

/* A destination that a process chose, and what else decides. */
struct dialling {
	struct address to;
	struct address from; /* zero: not bound */
	__u32 port;
	__u32 tcp;
	__u32 local;	       /* it is an address of this namespace */
	struct address source; /* that the routes give, zero if that is not known */
};

inline_always void find_place(const struct capture *c, struct dialling *d)
{
	__u64 i = (__u32)place_of(c, &d->to);

	if (i >= MAX_PLACES)
		return;
	/* The index is compared before it is multiplied, whatever the optimiser thinks of it. */
	asm volatile("" : "+r"(i));
	d->local = c->places[i].local;
	d->source = c->places[i].source;
}

/* Return the port of the proxy to which it goes, or 0: it is left alone.
 *
 * The same in words and order as the rules of ISTIO_OUTPUT (agent/model/plan.py). */
static __attribute__((noinline)) int redirected(const struct capture *c, const struct dialling *d)
{
	__u32 uid, gid;
	int four = is_ipv4(&d->to), dns = c->flags & DNS;
	int loopback, by_user, by_group;

	caller(c, &uid, &gid);
	if (!four && !(c->flags & CAPTURE_IPV6))
		return 0;
	if (any_span(&c->outbound_ports_exclude, d->port))
		return 0;
	if (d->local && is_passthrough(&d->from))
		return 0;
	loopback = four ? within(&c->loopback, &d->to) : is_ipv6_loopback(&d->to);
	by_user = any_span(&c->proxy_uid, uid);
	by_group = any_span(&c->proxy_gid, gid);
	if (d->local && !(c->flags & LOOPBACK_INCLUDED) && !(dns && (!d->tcp || d->port == 53))) {
		/* The first rule of "not the proxy, over lo" ends it, and names the first user. */
		by_user = uid >= c->proxy_uid.of[0].first && uid <= c->proxy_uid.of[0].last;
		if (!by_user)
			return 0;
	}
	if (by_user || by_group) {
		/* The proxy that calls its own pod by its address comes in again. */
		if (!d->local || !d->tcp || loopback || d->port == c->tunnel_port)
			return 0;
		return by_user && dns && d->port == 53 ? 0 : c->inbound_port;
	}
	if (!any_span(&c->groups, gid) != !!(c->flags & GROUPS_ALL))
		return 0;
	if (dns && d->port == 53) {
		if (c->flags & DNS_ALL)
			return c->dns_port;
		for (int i = 0; i < MAX_SERVERS; i++) {
			const struct address *s = &c->servers[i];

			if (i >= c->server_count)
				break;
			if (same(s, &d->to))
				return c->dns_port;
		}
	}
	if (loopback || any_network(&c->exclude, &d->to) || !d->tcp)
		return 0;
	if (any_span(&c->outbound_ports_include, d->port))
		return c->proxy_port;
	if (c->flags & OUTBOUND_ALL || any_network(&c->include, &d->to))
		return c->proxy_port;
	return 0;
}

inline_always void forget(struct bpf_sock_addr *ctx)
{
	if (ctx->sk)
		bpf_sk_storage_delete(&dialled, ctx->sk);
}

inline_always int remember(struct bpf_sock_addr *ctx, const struct dialling *d, int port)
{
	struct original o = { .address = d->to, .port = d->port, .turned_to = port };
	struct original *kept;

	if (!ctx->sk)
		return 0;
	kept = bpf_sk_storage_get(&dialled, ctx->sk, &o, BPF_SK_STORAGE_GET_F_CREATE);
	if (!kept)
		return 0;
	*kept = o;
	return 1;
}

/* A socket that is bound to eth0 cannot reach loopback: release it. */
inline_always void release_device(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	char none[4] = {};

	if (sk && sk->bound_dev_if > 1)
		bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, none, sizeof(none));
}

/* Whether a listener of this namespace takes connections to this address. */
inline_always int is_listening(struct bpf_sock_addr *ctx, const struct address *at, int port)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *found;

	if (is_ipv4(at)) {
		t.ipv4.saddr = t.ipv4.daddr = at->word[3];
		t.ipv4.dport = net16(port);
		found = bpf_sk_lookup_tcp(ctx, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
	} else {
		for (int i = 0; i < 4; i++)
			t.ipv6.saddr[i] = t.ipv6.daddr[i] = at->word[i];
		t.ipv6.dport = net16(port);
		found = bpf_sk_lookup_tcp(ctx, &t, sizeof(t.ipv6), BPF_F_CURRENT_NETNS, 0);
	}
	if (!found)
		return 0;
	bpf_sk_release(found);
	return 1;
}

inline_always void bind4(struct bpf_sock_addr *ctx, const struct address *source)
{
	struct {
		__u16 family, port;
		__u32 address;
		__u64 zero;
	} to = { .family = AF_INET, .address = source->word[3] };

	bpf_bind(ctx, &to, sizeof(to));
}

inline_always void bind6(struct bpf_sock_addr *ctx, const struct address *source)
{
	struct {
		__u16 family, port;
		__u32 flow;
		struct address address;
		__u32 scope;
	} to = { .family = AF_INET6, .address = *source };

	bpf_bind(ctx, &to, sizeof(to));
}

inline_always void loopback_of(struct address *out, const struct address *like)
{
	if (is_ipv4(like)) {
		set_ipv4(out, net32(0x7f000001));
	} else {
		out->word[0] = out->word[1] = out->word[2] = 0;
		out->word[3] = net32(1);
	}
}

/* Whether it is known as an address of this namespace: one that is new is not, and what is sent to
 * it then looks like what arrives. */
inline_always int is_own(struct bpf_sock_addr *ctx, const struct address *address)
{
	struct own key = { .netns = bpf_get_netns_cookie(ctx), .address = *address };

	return !!bpf_map_lookup_elem(&own_addresses, &key);
}

/* Look the destination up and decide; `to` is then where the connection goes instead. Return the
 * port, 0 to leave it alone, or -1 to refuse it because it cannot be kept track of. `source` is then
 * the address to bind to, if any.
 *
 * The proxy is to see the address that the application would have had without it. A socket without
 * a port can be bound to that. One that has chosen its port cannot; if the proxy listens there, it
 * is called at that address, and the kernel then takes the same as the source. So it is, too, with
 * any of IPv6: for ::1 the kernel looks for a way by the interface that has the other address, so it
 * never answers there for a connection that its client has closed, and the proxy's end lingers. */
inline_always int turned(struct bpf_sock_addr *ctx, const struct capture *c, struct dialling *d,
			 struct address *to)
{
	int port, chosen;

	find_place(c, d);
	port = redirected(c, d);
	if (!port) {
		forget(ctx);
		return 0;
	}
	if (!remember(ctx, d, port))
		return -1;
	loopback_of(to, &d->to);
	chosen = is_set(&d->from) || ctx->sk->src_port;
	if (is_set(&d->from))
		d->source = is_ipv4(&d->to) ? (struct address){} : d->from;
	if (!is_set(&d->source) || (!chosen && is_ipv4(&d->to)))
		return port;
	if (d->tcp && is_own(ctx, &d->source) && is_listening(ctx, &d->source, port)) {
		*to = d->source;
		chosen = 1;
	}
	if (chosen)
		d->source = (struct address){};
	return port;
}

/* Who dials the unspecified address is given loopback by the kernel. */
inline_always void name_loopback(struct address *to)
{
	if (!is_set(to))
		to->word[3] = net32(1);
	else if (is_ipv4(to) && !to->word[3])
		to->word[3] = net32(0x7f000001);
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct dialling d = { .tcp = ctx->protocol == IPPROTO_TCP };
	struct capture *c;
	struct address to;
	int port;

	d.port = net16(ctx->user_port);
	if (!d.tcp && !(ctx->protocol == IPPROTO_UDP && d.port == 53)) {
		forget(ctx);
		return 1;
	}
	c = capture_of(ctx);
	if (!c)
		return 1;
	if (passes(ctx, c)) {
		forget(ctx);
		return 1;
	}
	set_ipv4(&d.to, ctx->user_ip4);
	name_loopback(&d.to);
	if (ctx->sk && ctx->sk->src_ip4)
		set_ipv4(&d.from, ctx->sk->src_ip4);
	port = turned(ctx, c, &d, &to);
	if (port <= 0)
		return !port;
	release_device(ctx);
	if (is_set(&d.source))
		bind4(ctx, &d.source);
	ctx->user_ip4 = to.word[3];
	ctx->user_port = net16(port);
	return 1;
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct dialling d = { .tcp = ctx->protocol == IPPROTO_TCP };
	struct capture *c;
	struct address to;
	int port;

	d.port = net16(ctx->user_port);
	if (!d.tcp && !(ctx->protocol == IPPROTO_UDP && d.port == 53)) {
		forget(ctx);
		return 1;
	}
	c = capture_of(ctx);
	if (!c)
		return 1;
	if (passes(ctx, c)) {
		forget(ctx);
		return 1;
	}
	d.to.word[0] = ctx->user_ip6[0];
	d.to.word[1] = ctx->user_ip6[1];
	d.to.word[2] = ctx->user_ip6[2];
	d.to.word[3] = ctx->user_ip6[3];
	name_loopback(&d.to);
	if (ctx->sk) {
		d.from.word[0] = ctx->sk->src_ip6[0];
		d.from.word[1] = ctx->sk->src_ip6[1];
		d.from.word[2] = ctx->sk->src_ip6[2];
		d.from.word[3] = ctx->sk->src_ip6[3];
	}
	port = turned(ctx, c, &d, &to);
	if (port <= 0)
		return !port;
	release_device(ctx);
	if (is_set(&d.source))
		bind6(ctx, &d.source);
	ctx->user_ip6[0] = to.word[0];
	ctx->user_ip6[1] = to.word[1];
	ctx->user_ip6[2] = to.word[2];
	ctx->user_ip6[3] = to.word[3];
	ctx->user_port = net16(port);
	return 1;
}

/* A datagram that names its destination: DNS, or nothing for us. */
inline_always int names_dns(struct bpf_sock_addr *ctx)
{
	return (__u16)ctx->user_port == net16(53) && ctx->protocol == IPPROTO_UDP;
}

/* A socket that is bound to a device has chosen it before this runs, so this datagram cannot reach
 * loopback. It is refused; if the socket can be released, the next one gets there. */
inline_always int is_held(struct bpf_sock_addr *ctx)
{
	if (!ctx->sk || ctx->sk->bound_dev_if <= 1)
		return 0;
	release_device(ctx);
	return 1;
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	struct dialling d = { .port = 53 };
	struct capture *c;
	int port;

	if (!names_dns(ctx) || !(c = capture_of(ctx)) || passes(ctx, c))
		return 1;
	set_ipv4(&d.to, ctx->user_ip4);
	name_loopback(&d.to);
	if (ctx->msg_src_ip4)
		set_ipv4(&d.from, ctx->msg_src_ip4);
	find_place(c, &d);
	port = redirected(c, &d);
	if (!port)
		return 1;
	if (is_held(ctx) || !remember(ctx, &d, port))
		return 0;
	if (!is_set(&d.from) && is_ipv4(&d.source))
		ctx->msg_src_ip4 = d.source.word[3];
	ctx->user_ip4 = net32(0x7f000001);
	ctx->user_port = net16(port);
	return 1;
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	struct dialling d = { .port = 53 };
	struct capture *c;
	struct address to;
	int port;

	if (!names_dns(ctx) || !(c = capture_of(ctx)) || passes(ctx, c))
		return 1;
	d.to.word[0] = ctx->user_ip6[0];
	d.to.word[1] = ctx->user_ip6[1];
	d.to.word[2] = ctx->user_ip6[2];
	d.to.word[3] = ctx->user_ip6[3];
	name_loopback(&d.to);
	d.from.word[0] = ctx->msg_src_ip6[0];
	d.from.word[1] = ctx->msg_src_ip6[1];
	d.from.word[2] = ctx->msg_src_ip6[2];
	d.from.word[3] = ctx->msg_src_ip6[3];
	find_place(c, &d);
	port = redirected(c, &d);
	if (!port)
		return 1;
	if (is_held(ctx) || !remember(ctx, &d, port))
		return 0;
	if (!is_set(&d.from) && is_set(&d.source)) {
		ctx->msg_src_ip6[0] = d.source.word[0];
		ctx->msg_src_ip6[1] = d.source.word[1];
		ctx->msg_src_ip6[2] = d.source.word[2];
		ctx->msg_src_ip6[3] = d.source.word[3];
	}
	loopback_of(&to, &d.to);
	ctx->user_ip6[0] = to.word[0];
	ctx->user_ip6[1] = to.word[1];
	ctx->user_ip6[2] = to.word[2];
	ctx->user_ip6[3] = to.word[3];
	ctx->user_port = net16(port);
	return 1;
}

inline_always struct original *dialled_by(struct bpf_sock_addr *ctx)
{
	return ctx->sk ? bpf_sk_storage_get(&dialled, ctx->sk, 0, 0) : 0;
}

/* Whether a datagram comes from the proxy's DNS port of this namespace. */
inline_always int from_dns_proxy(struct bpf_sock_addr *ctx)
{
	struct capture *c = capture_of(ctx);

	return c && c->dns_port && (__u16)ctx->user_port == net16(c->dns_port);
}

/* An answer comes from the server that was asked. */
SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	struct original *o;

	if (ctx->user_ip4 != net32(0x7f000001) || !(o = dialled_by(ctx)))
		return 1;
	if (is_ipv4(&o->address) && from_dns_proxy(ctx)) {
		ctx->user_ip4 = o->address.word[3];
		ctx->user_port = net16(o->port);
	}
	return 1;
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	struct address from, loopback;
	struct original *o;

	from.word[0] = ctx->user_ip6[0];
	from.word[1] = ctx->user_ip6[1];
	from.word[2] = ctx->user_ip6[2];
	from.word[3] = ctx->user_ip6[3];
	loopback_of(&loopback, &from);
	if (from.word[0] || from.word[1] || from.word[2] != loopback.word[2] ||
	    from.word[3] != loopback.word[3] || !(o = dialled_by(ctx)))
		return 1;
	if (from_dns_proxy(ctx)) {
		ctx->user_ip6[0] = o->address.word[0];
		ctx->user_ip6[1] = o->address.word[1];
		ctx->user_ip6[2] = o->address.word[2];
		ctx->user_ip6[3] = o->address.word[3];
		ctx->user_port = net16(o->port);
	}
	return 1;
}

/* A datagram socket may be connected to one and have asked another. */
inline_always struct original *peer_dialled_by(struct bpf_sock_addr *ctx)
{
	struct original *o = dialled_by(ctx);

	return o && (__u16)ctx->user_port == net16(o->turned_to) ? o : 0;
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	struct original *o = peer_dialled_by(ctx);

	if (o && is_ipv4(&o->address)) {
		ctx->user_ip4 = o->address.word[3];
		ctx->user_port = net16(o->port);
	}
	return 1;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	struct original *o = peer_dialled_by(ctx);

	if (o) {
		ctx->user_ip6[0] = o->address.word[0];
		ctx->user_ip6[1] = o->address.word[1];
		ctx->user_ip6[2] = o->address.word[2];
		ctx->user_ip6[3] = o->address.word[3];
		ctx->user_port = net16(o->port);
	}
	return 1;
}

/* Only the proxy may take the ports to which the traffic of its namespace goes. */
inline_always int may_bind(struct bpf_sock_addr *ctx)
{
	__u32 port = net16(ctx->user_port);
	struct capture *c;

	if (!port || !(c = capture_of(ctx)))
		return 1;
	if (port == c->dns_port)
		return is_proxy(c);
	if (ctx->protocol == IPPROTO_TCP && (port == c->proxy_port || port == c->inbound_port))
		return is_proxy(c);
	return 1;
}

SEC("cgroup/bind4")
int guard4(struct bpf_sock_addr *ctx)
{
	return may_bind(ctx);
}

SEC("cgroup/bind6")
int guard6(struct bpf_sock_addr *ctx)
{
	return may_bind(ctx);
}

inline_always int is_proxy_port(const struct capture *c, __u32 port)
{
	return port == c->proxy_port || port == c->inbound_port || port == c->dns_port;
}

/* The SYN is about to leave, so the source port is known. */
inline_always void publish(struct bpf_sock_ops *ctx)
{
	struct connection key = {};
	struct original *o = 0;
	struct capture *c;

	if (ctx->sk)
		o = bpf_sk_storage_get(&dialled, ctx->sk, 0, 0);
	key.netns = bpf_get_netns_cookie(ctx);
	key.from_port = ctx->local_port;
	key.to_port = net32(ctx->remote_port);
	READ_ADDRESS(key.from, ctx, ctx->family, local_ip4, local_ip6);
	READ_ADDRESS(key.to, ctx, ctx->family, remote_ip4, remote_ip6);
	if (o) {
		bpf_map_update_elem(&handshakes, &key, o, BPF_ANY);
		return;
	}
	/* Nobody turned this one. What an earlier one that was never answered left must not count. */
	c = bpf_map_lookup_elem(&captures, &key.netns);
	if (c && is_proxy_port(c, key.to_port))
		bpf_map_delete_elem(&handshakes, &key);
}

/* The proxy's end is there and nobody can have accepted it yet. */
inline_always void take_over(struct bpf_sock_ops *ctx)
{
	struct connection key = {};
	struct original *o;
	struct capture *c;

	key.netns = bpf_get_netns_cookie(ctx);
	c = bpf_map_lookup_elem(&captures, &key.netns);
	if (!c || !is_proxy_port(c, ctx->local_port))
		return;
	key.from_port = net32(ctx->remote_port);
	key.to_port = ctx->local_port;
	READ_ADDRESS(key.from, ctx, ctx->family, remote_ip4, remote_ip6);
	READ_ADDRESS(key.to, ctx, ctx->family, local_ip4, local_ip6);
	o = bpf_map_lookup_elem(&handshakes, &key);
	if (!o)
		return;
	if (ctx->sk)
		bpf_sk_storage_get(&accepted, ctx->sk, o, BPF_SK_STORAGE_GET_F_CREATE);
	bpf_map_delete_elem(&handshakes, &key);
}

/* The proxy listens: that closes a gate. Keep the socket, so that inbound connections can be given
 * to it. */
inline_always void keep_listener(struct bpf_sock_ops *ctx)
{
	struct listener key = {};
	__u32 port = ctx->local_port, yes = 1, first = 0;
	struct capture *c;

	/* This has the program hold the map, by which its pin can be put back. */
	if (!bpf_map_lookup_elem(&about, &first))
		return;
	key.netns = bpf_get_netns_cookie(ctx);
	c = bpf_map_lookup_elem(&captures, &key.netns);
	if (!c || (port != c->proxy_port && port != c->inbound_port))
		return;
	bpf_map_update_elem(&listened, &key.netns, &yes, BPF_ANY);
	if (port != c->inbound_port)
		return;
	key.port = c->inbound_port;
	key.family = ctx->family;
	for (int i = 0; i < SLOTS; i++) {
		key.slot = i;
		if (!bpf_sock_hash_update(ctx, &listeners, &key, BPF_NOEXIST))
			return;
	}
	key.slot = bpf_get_socket_cookie(ctx) % SLOTS;
	bpf_sock_hash_update(ctx, &listeners, &key, BPF_ANY);
}

/* `reply` is shared with other programs of the node and never written. */
SEC("sockops")
int handshake(struct bpf_sock_ops *ctx)
{
	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		publish(ctx);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		take_over(ctx);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		keep_listener(ctx);
		break;
	}
	return 1;
}

/* SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST, which have the same number. */
SEC("cgroup/getsockopt")
int original_dst(struct bpf_sockopt *ctx)
{
	int four = ctx->level == IPPROTO_IP;
	__u8 *out = ctx->optval, *end = ctx->optval_end;
	struct bpf_sock *sk = ctx->sk;
	struct original o = {}, *known;

	if (ctx->optname != 80 || (!four && ctx->level != IPPROTO_IPV6))
		return 1;
	if (!sk || sk->protocol != IPPROTO_TCP)
		return 1;
	READ_ADDRESS(o.address, sk, four ? AF_INET : AF_INET6, src_ip4, src_ip6);
	o.port = sk->src_port;
	known = bpf_sk_storage_get(&accepted, sk, 0, 0);
	if (known)
		o = *known;
	else if (!ctx->retval || !capture_of(ctx))
		return 1; /* conntrack knows it, or the kernel's answer stands */
	if (four) {
		if (out + 16 > end || !is_ipv4(&o.address))
			return 1;
		*(__u16 *)out = AF_INET;
		*(__u16 *)(out + 2) = net16(o.port);
		*(__u32 *)(out + 4) = o.address.word[3];
		*(__u64 *)(out + 8) = 0;
		ctx->optlen = 16;
	} else {
		if (out + 28 > end)
			return 1;
		*(__u16 *)out = AF_INET6;
		*(__u16 *)(out + 2) = net16(o.port);
		*(__u32 *)(out + 4) = 0;
		*(__u32 *)(out + 8) = o.address.word[0];
		*(__u32 *)(out + 12) = o.address.word[1];
		*(__u32 *)(out + 16) = o.address.word[2];
		*(__u32 *)(out + 20) = o.address.word[3];
		*(__u32 *)(out + 24) = 0;
		ctx->optlen = 28;
	}
	ctx->retval = 0;
	return 1;
}

char license_[] SEC("license") = "Dual BSD/GPL";
