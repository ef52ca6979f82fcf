/* What `intercept-agent flows` sees: programs at the root of cgroup2 that look on and change nothing.
 *
 * bcc compiles them to the question that is asked; agent/flows/compiling.py puts these in front:
 *   NETNS            the one network namespace that is asked about, if it is one; else `watched`
 *   ASKS_UID(uid), ASKS_PORT(port)  of outbound ones; who accepts the others is not known here
 *   DIALLED          "maps/sk_storage:PIN" where the eBPF backend remembers who was dialled, if it
 *                    is loaded
 *
 * A connection is told of once, when it is known what became of it: it stands, it failed, or its
 * first packet was sent again. Until then its socket remembers it, so nothing has to be kept and
 * nothing is left over. Where it really went is read off its first packet behind every translation
 * (ip_finish_output comes after POSTROUTING); a packet that a rule dropped never gets there.
 *
 * Every address is of 16 bytes, IPv4 as ::ffff:a.b.c.d. Ports are in host order. */

#define AF_INET 2
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define DNS_PORT 53

enum kind { OUT_TCP = 1, OUT_UDP, IN_TCP };
enum result { CONNECTED = 1, REFUSED, UNANSWERED, FAILED };

struct address {
	u32 word[4];
};

/* The form in which agent/flows/event.py reads it. */
struct event {
	u64 at_ns, took_ns; /* CLOCK_MONOTONIC, and how long it took */
	u64 netns;
	u32 pid, uid, gid, mark;
	struct address source, asked, went; /* of an inbound one, `went` is the local end */
	u16 source_port, asked_port, went_port;
	u16 listening_port; /* of the socket that accepted an inbound one, 0 if that is not known */
	u8 kind, result;
	u8 left; /* the first packet was on its way out, to `went` */
	u8 unused[5];
	char name[16];
};
_Static_assert(sizeof(struct event) == 120, "agent/flows/event.py unpacks this");

/* As the eBPF backend has it (bpf/capture.h). */
struct original {
	struct address address;
	u32 port;
	u32 turned_to;
};

#define STORAGE(name, type, where, more)                                                          \
	struct name##_map {                                                                       \
		int key;                                                                          \
		type leaf;                                                                        \
		void *(*sk_storage_get)(void *, void *, int);                                     \
		int (*sk_storage_delete)(void *);                                                 \
		u32 flags;                                                                        \
	};                                                                                        \
	__attribute__((section(where)))                                                           \
	struct name##_map name = {.flags = BPF_F_NO_PREALLOC | (more)};                           \
	BPF_ANNOTATE_KV_PAIR(name, int, type)

STORAGE(begun, struct event, "maps/sk_storage", 0);
/* On which port a listener listens; what it accepts inherits it. */
STORAGE(listening, u32, "maps/sk_storage", BPF_F_CLONE);
#ifdef DIALLED
STORAGE(dialled, struct original, DIALLED, 0);
#endif

BPF_RINGBUF_OUTPUT(events, RING_PAGES);
BPF_ARRAY(lost, u64, 1);
#ifndef NETNS
BPF_HASH(watched, u64, u8, MAX_WATCHED);
#endif

static inline int is_watched(u64 netns)
{
#ifdef NETNS
	return netns == NETNS;
#else
	return watched.lookup(&netns) != 0;
#endif
}

static inline void set_ipv4(struct address *out, u32 ipv4)
{
	out->word[0] = out->word[1] = 0;
	out->word[2] = bpf_htonl(0xffff);
	out->word[3] = ipv4;
}

/* Both families' fields are read, at constant offsets, and hidden from the optimiser: it likes to
 * merge the reads behind one computed pointer, which the verifier refuses. */
#define READ_ADDRESS(out, family, ipv4, ipv6)                                                     \
	do {                                                                                      \
		u32 v4_ = (ipv4), a_ = (ipv6)[0], b_ = (ipv6)[1], c_ = (ipv6)[2], d_ = (ipv6)[3]; \
		asm volatile("" : "+r"(v4_), "+r"(a_), "+r"(b_), "+r"(c_), "+r"(d_));             \
		if ((family) == AF_INET) {                                                        \
			set_ipv4(&(out), v4_);                                                    \
		} else {                                                                          \
			(out).word[0] = a_;                                                       \
			(out).word[1] = b_;                                                       \
			(out).word[2] = c_;                                                       \
			(out).word[3] = d_;                                                       \
		}                                                                                 \
	} while (0)

static inline void tell(struct event *e)
{
	if (ASKS_PORT(e->asked_port) && events.ringbuf_output(e, sizeof(*e), 0))
		lost.atomic_increment(0);
}

/* A datagram that never left is told of when its socket goes on to the next, or ends. */
static inline void dropped(struct event *e)
{
	if (e->kind == OUT_UDP && !e->left && !e->result) {
		e->result = FAILED;
		tell(e);
	}
}

/* --- who dials ------------------------------------------------------------------------------- */

static inline int begin(struct bpf_sock_addr *ctx, struct address *to)
{
	u32 tcp = ctx->protocol == IPPROTO_TCP, udp = ctx->protocol == IPPROTO_UDP;
	u64 ids, netns = bpf_get_netns_cookie(ctx);
	struct event e = {}, *kept;
	struct bpf_sock *sk = ctx->sk;

	if (!sk || !is_watched(netns))
		return 1;
	ids = bpf_get_current_uid_gid();
	e.uid = ids;
	e.gid = ids >> 32;
	e.mark = sk->mark;
	e.asked = *to;
	e.asked_port = bpf_ntohs(ctx->user_port);
#ifdef DIALLED
	{
		struct original *o = dialled.sk_storage_get(sk, 0, 0);

		/* What a datagram of before left there does not count. */
		if (o && o->turned_to == e.asked_port) {
			e.asked = o->address;
			e.asked_port = o->port;
		}
	}
#endif
	if (!ASKS_UID(e.uid) || !(tcp || (udp && e.asked_port == DNS_PORT))) {
		begun.sk_storage_delete(sk);
		return 1;
	}
	e.kind = tcp ? OUT_TCP : OUT_UDP;
	e.at_ns = bpf_ktime_get_ns();
	e.netns = netns;
	e.pid = bpf_get_current_pid_tgid() >> 32;
	bpf_get_current_comm(e.name, sizeof(e.name));
	kept = begun.sk_storage_get(sk, 0, 0);
	if (kept) {
		dropped(kept);
		*kept = e;
	} else if (!begun.sk_storage_get(sk, &e, BPF_SK_STORAGE_GET_F_CREATE)) {
		lost.atomic_increment(0);
	}
	return 1;
}

static inline void read_ipv4(struct bpf_sock_addr *ctx, struct address *to)
{
	u32 given = ctx->user_ip4;

	set_ipv4(to, given ? given : bpf_htonl(0x7f000001));
}

static inline void read_ipv6(struct bpf_sock_addr *ctx, struct address *to)
{
	to->word[0] = ctx->user_ip6[0];
	to->word[1] = ctx->user_ip6[1];
	to->word[2] = ctx->user_ip6[2];
	to->word[3] = ctx->user_ip6[3];
	if (!(to->word[0] | to->word[1] | to->word[2] | to->word[3]))
		to->word[3] = bpf_htonl(1);
}

int flows_connect4(struct bpf_sock_addr *ctx)
{
	struct address to;

	read_ipv4(ctx, &to);
	return begin(ctx, &to);
}

int flows_connect6(struct bpf_sock_addr *ctx)
{
	struct address to;

	read_ipv6(ctx, &to);
	return begin(ctx, &to);
}

int flows_sendmsg4(struct bpf_sock_addr *ctx)
{
	struct address to;

	read_ipv4(ctx, &to);
	return begin(ctx, &to);
}

int flows_sendmsg6(struct bpf_sock_addr *ctx)
{
	struct address to;

	read_ipv6(ctx, &to);
	return begin(ctx, &to);
}

/* --- where its first packet goes ------------------------------------------------------------- */

struct ports {
	__be16 source, destination;
};

static inline int read_packet(struct __sk_buff *skb, struct event *e)
{
	void *start = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	u32 *word = start;
	struct ports *ports;

	if (start + 24 > end)
		return 0;
	if (*(u8 *)start >> 4 == 4) {
		if ((*(u8 *)start & 15) != 5)
			return 0;
		ports = start + 20;
		set_ipv4(&e->source, word[3]);
		set_ipv4(&e->went, word[4]);
	} else {
		if (start + 44 > end)
			return 0;
		ports = start + 40;
		__builtin_memcpy(&e->source, start + 8, sizeof(e->source));
		__builtin_memcpy(&e->went, start + 24, sizeof(e->went));
	}
	e->source_port = bpf_ntohs(ports->source);
	e->went_port = bpf_ntohs(ports->destination);
	return 1;
}

int flows_egress(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct event *e;

	if (!sk)
		return 1;
	sk = bpf_sk_fullsock(sk);
	if (!sk)
		return 1;
	e = begun.sk_storage_get(sk, 0, 0);
	if (!e || e->left || !read_packet(skb, e))
		return 1;
	e->left = 1;
	if (e->kind == OUT_UDP)
		tell(e);
	return 1;
}

int flows_release(struct bpf_sock *sk)
{
	struct event *e = begun.sk_storage_get(sk, 0, 0);

	if (e)
		dropped(e);
	return 1;
}

/* --- what becomes of it ---------------------------------------------------------------------- */

static inline void end(struct bpf_sock_ops *ctx, struct bpf_sock *sk, u8 result)
{
	struct event *e = begun.sk_storage_get(sk, 0, 0);

	if (!e || e->kind != OUT_TCP || e->result)
		return;
	e->result = result;
	e->took_ns = bpf_ktime_get_ns() - e->at_ns;
	tell(e);
	begun.sk_storage_delete(sk);
}

static inline void arrive(struct bpf_sock_ops *ctx, struct bpf_sock *sk)
{
	struct event e = {};
	u32 *port;

	e.netns = bpf_get_netns_cookie(ctx);
	if (!is_watched(e.netns))
		return;
	READ_ADDRESS(e.source, ctx->family, ctx->remote_ip4, ctx->remote_ip6);
	READ_ADDRESS(e.went, ctx->family, ctx->local_ip4, ctx->local_ip6);
	e.source_port = bpf_ntohl(ctx->remote_port);
	e.went_port = ctx->local_port;
	port = listening.sk_storage_get(sk, 0, 0);
	if (port)
		e.listening_port = *port;
	e.kind = IN_TCP;
	e.result = CONNECTED;
	e.left = 1;
	e.at_ns = bpf_ktime_get_ns();
	if (events.ringbuf_output(&e, sizeof(e), 0))
		lost.atomic_increment(0);
}

static inline void note_port(struct bpf_sock_ops *ctx, struct bpf_sock *sk)
{
	u64 netns = bpf_get_netns_cookie(ctx);
	u32 port = ctx->local_port;

	if (is_watched(netns))
		listening.sk_storage_get(sk, &port, BPF_SK_STORAGE_GET_F_CREATE);
}

/* `reply` is shared with other programs of the node and never written. */
int flows_sockops(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	u32 op = ctx->op;

	if (!sk)
		return 1;
	if (op == BPF_SOCK_OPS_TCP_CONNECT_CB) {
		if (begun.sk_storage_get(sk, 0, 0))
			bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags |
							       BPF_SOCK_OPS_STATE_CB_FLAG |
							       BPF_SOCK_OPS_RETRANS_CB_FLAG);
	} else if (op == BPF_SOCK_OPS_STATE_CB) {
		if (ctx->args[0] != BPF_TCP_SYN_SENT)
			return 1;
		if (ctx->args[1] == BPF_TCP_ESTABLISHED)
			end(ctx, sk, CONNECTED);
		else if (ctx->args[1] == BPF_TCP_CLOSE)
			end(ctx, sk, ctx->segs_in ? REFUSED : FAILED);
	} else if (op == BPF_SOCK_OPS_RETRANS_CB) {
		if (ctx->state == BPF_TCP_SYN_SENT)
			end(ctx, sk, UNANSWERED);
	} else if (op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
		arrive(ctx, sk);
	} else if (op == BPF_SOCK_OPS_TCP_LISTEN_CB) {
		note_port(ctx, sk);
	}
	return 1;
}
