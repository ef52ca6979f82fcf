/* The redirect of what arrives: one program in each captured namespace, asked before the kernel
 * looks for a listener. A program of this kind cannot ask in which namespace it runs, so each is
 * loaded with the namespace's cookie in it: `netns_cookie` is a symbol whose address is that number
 * (agent/formats/bpf_object.py puts it in). */
#include "capture.h"

extern char netns_cookie[];

/* Look into every slot of a family; unrolled, which is less for the verifier to look at. */
inline_always struct bpf_sock *listener_of(struct listener *key, __u16 family)
{
	struct bpf_sock *found;

	key->family = family;
#pragma unroll
	for (int i = 0; i < SLOTS; i++) {
		key->slot = i;
		found = bpf_map_lookup_elem(&listeners, key);
		if (found)
			return found;
	}
	return 0;
}

inline_always int is_listed(const struct ports *ports, __u32 port)
{
	return ports->word[(port & 0xffff) / 32] >> (port % 32) & 1;
}

/* Tell whether both ends are this namespace's own; `from` is then of no use.
 *
 * What it sends to itself does not arrive. ctx->ingress_ifindex cannot tell: it is the index of the
 * interface that has the address, also over lo. Whoever is outside and uses such a source never
 * gets an answer. An address may be so new that it is not known as one's own yet; its calls to
 * loopback, which turned connections are, count all the same. */
inline_always int stays_inside(struct bpf_sk_lookup *ctx, struct own *from)
{
	__u32 of4 = ctx->remote_ip4, to4 = ctx->local_ip4;

	asm volatile("" : "+r"(of4), "+r"(to4)); /* as in READ_ADDRESS */
	if (ctx->family == AF_INET) {
		if ((of4 & net32(0xff000000)) == net32(0x7f000000) ||
		    (to4 & net32(0xff000000)) == net32(0x7f000000))
			return 1;
		set_ipv4(&from->address, of4);
	} else {
		from->address.word[0] = ctx->remote_ip6[0];
		from->address.word[1] = ctx->remote_ip6[1];
		from->address.word[2] = ctx->remote_ip6[2];
		from->address.word[3] = ctx->remote_ip6[3];
		/* ::/32 has loopback, ::6, and nothing that is ever outside. */
		if (!from->address.word[0] || !ctx->local_ip6[0])
			return 1;
	}
	return !!bpf_map_lookup_elem(&own_addresses, from);
}

SEC("sk_lookup")
int inbound(struct bpf_sk_lookup *ctx)
{
	__u64 netns = (__u64)netns_cookie;
	struct listener key;
	struct bpf_sock *found;
	struct own from;
	struct capture *c;
	__u32 port;
	long failed;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	c = bpf_map_lookup_elem(&captures, &netns);
	if (!c || is_open(c, netns) || (ctx->family != AF_INET && !(c->flags & CAPTURE_IPV6)))
		return SK_PASS;
	port = ctx->local_port;
	if (port == c->tunnel_port || is_listed(&c->inbound_ports, port) == !!(c->flags & INBOUND_ALL))
		return SK_PASS;
	from.netns = netns;
	if (stays_inside(ctx, &from))
		return SK_PASS;
	key.netns = netns;
	key.port = c->inbound_port;
	found = ctx->family == AF_INET ? listener_of(&key, AF_INET) : 0;
	if (!found) /* of [::], which may take IPv4, too */
		found = listener_of(&key, AF_INET6);
	if (!found)
		return SK_DROP;
	failed = bpf_sk_assign(ctx, found, 0);
	bpf_sk_release(found);
	return failed ? SK_DROP : SK_PASS;
}
