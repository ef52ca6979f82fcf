/* For a namespace whose proxy listens already when it is captured: reading the iterator made of this
 * puts its listeners where listen() would have put them. Needs the kernel's type information. */
#include "capture.h"

#define OF_THE_KERNEL __attribute__((preserve_access_index))

struct net {
	__u64 net_cookie;
} OF_THE_KERNEL;
typedef struct {
	struct net *net;
} possible_net_t;
struct sock_common {
	unsigned short skc_family;
	unsigned char skc_state;
	__u16 skc_num;
	possible_net_t skc_net;
} OF_THE_KERNEL;
struct bpf_iter__tcp {
	void *meta;
	struct sock_common *sk_common;
} OF_THE_KERNEL;

/* Whose listeners are looked for, and on which port. */
struct wanted {
	__u64 netns;
	__u32 port, unused;
};

struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_ARRAY);
	MAP_NUMBER(max_entries, 1);
	MAP_TYPE(key, __u32);
	MAP_TYPE(value, struct wanted);
} adopting SEC(".maps");

SEC("iter/tcp")
int adopt(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	struct wanted *wanted;
	struct listener key = {};
	__u32 first = 0;

	wanted = bpf_map_lookup_elem(&adopting, &first);
	if (!sk || !wanted || sk->skc_state != TCP_LISTEN || sk->skc_num != wanted->port)
		return 0;
	if (sk->skc_net.net->net_cookie != wanted->netns)
		return 0;
	key.netns = wanted->netns;
	key.port = wanted->port;
	key.family = sk->skc_family;
	for (int i = 0; i < SLOTS; i++) {
		key.slot = i;
		if (!bpf_map_update_elem(&listeners, &key, sk, BPF_NOEXIST))
			return 0;
	}
	key.slot = bpf_get_socket_cookie(sk) % SLOTS;
	bpf_map_update_elem(&listeners, &key, sk, BPF_ANY);
	return 0;
}

char license_[] SEC("license") = "Dual BSD/GPL";
