/* The redirect of what arrives: one program in each captured namespace, asked before the kernel
 * looks for a listener. A program of this kind cannot ask in which namespace it runs, so each is
 * loaded with the namespace's cookie in it: `netns_cookie` is a symbol whose address is that number
 * (agent/formats/bpf_object.py puts it in). */
#include "capture.h"

extern char netns_cookie[];

inline_always struct bpf_sock *listener_of(struct listener *key)
{
	struct bpf_sock *found;

#pragma unroll
	for (int i = 0; i < SLOTS; i++) {
		key->slot = i;
		found = bpf_map_lookup_elem(&listeners, key);
		if (found)
			return found;
	}
	return 0;
}

inline_always int is_loopback(const struct address *a)
{
	if (is_ipv4(a))
		return (a->word[3] & net32(0xff000000)) == net32(0x7f000000);
	return is_ipv6_loopback(a);
}

/* Every namespace's program is looked at by the verifier, so its loops are kept small. */
inline_always int is_own(const struct capture *c, const struct address *a)
{
	for (int i = 0; i < MAX_OWN; i++) {
		if (i >= c->own_count)
			return 0;
		if (same(&c->own[i], a))
			return 1;
	}
	return 0;
}

SEC("sk_lookup")
int inbound(struct bpf_sk_lookup *ctx)
{
	__u64 netns = (__u64)netns_cookie;
	struct listener key = {};
	struct bpf_sock *found;
	struct address from, to;
	struct capture *c;
	__u32 port;
	long failed;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	c = bpf_map_lookup_elem(&captures, &netns);
	if (!c || (ctx->family != AF_INET && !(c->flags & CAPTURE_IPV6)))
		return SK_PASS;
	port = ctx->local_port;
	if (port == c->tunnel_port || any_span(&c->inbound_ports, port) == !!(c->flags & INBOUND_ALL))
		return SK_PASS;
	/* What this namespace sends to itself does not arrive. ctx->ingress_ifindex cannot tell: it
	 * is the index of the interface that has the address, also over lo. Whoever is outside and
	 * uses such a source never gets an answer. An address may be so new that it is not known as
	 * one's own yet; its calls to loopback, which turned connections are, pass all the same. */
	READ_ADDRESS(from, ctx, ctx->family, remote_ip4, remote_ip6);
	READ_ADDRESS(to, ctx, ctx->family, local_ip4, local_ip6);
	if (is_loopback(&to) || is_loopback(&from) || is_own(c, &from))
		return SK_PASS;
	key.netns = netns;
	key.port = c->inbound_port;
	key.family = ctx->family;
	found = listener_of(&key);
	if (!found && key.family == AF_INET) { /* one of [::] that takes IPv4, too */
		key.family = AF_INET6;
		found = listener_of(&key);
	}
	if (!found)
		return SK_DROP;
	failed = bpf_sk_assign(ctx, found, 0);
	bpf_sk_release(found);
	return failed ? SK_DROP : SK_PASS;
}
