/* What the programs need of the kernel's stable interface (uapi/linux/bpf.h), and nothing more, so
 * that building them takes clang alone: no kernel headers, no libbpf headers. */
#pragma once

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;

#define SEC(name) __attribute__((section(name), used))
#define inline_always static inline __attribute__((always_inline))

/* The form in which libbpf reads maps out of the object's type information. */
#define MAP_NUMBER(name, value) int(*name)[value]
#define MAP_TYPE(name, value) typeof(value) *name

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define net16(x) ((__u16)__builtin_bswap16(x))
#define net32(x) ((__u32)__builtin_bswap32(x))
#else
#define net16(x) ((__u16)(x))
#define net32(x) ((__u32)(x))
#endif

enum { AF_INET = 2, AF_INET6 = 10 };
enum { SOCK_STREAM = 1, SOCK_DGRAM = 2 };
enum { IPPROTO_IP = 0, IPPROTO_TCP = 6, IPPROTO_UDP = 17, IPPROTO_IPV6 = 41 };
enum { SOL_SOCKET = 1, SO_BINDTODEVICE = 25 };
enum { TCP_LISTEN = 10 };

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_SOCKHASH = 18,
	BPF_MAP_TYPE_SK_STORAGE = 24,
};
enum { BPF_ANY = 0, BPF_NOEXIST = 1, BPF_F_NO_PREALLOC = 1 };
enum { BPF_SK_STORAGE_GET_F_CREATE = 1 };
#define BPF_F_CURRENT_NETNS (-1)

enum {
	BPF_SOCK_OPS_TCP_CONNECT_CB = 3,
	BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB = 5,
	BPF_SOCK_OPS_TCP_LISTEN_CB = 11,
};
enum { SK_DROP = 0, SK_PASS = 1 };

struct bpf_sock {
	__u32 bound_dev_if, family, type, protocol, mark, priority;
	__u32 src_ip4;
	__u32 src_ip6[4];
	__u32 src_port; /* host order */
	__u16 dst_port; /* network order */
	__u16 : 16;
	__u32 dst_ip4;
	__u32 dst_ip6[4];
	__u32 state;
	int rx_queue_mapping;
};

struct bpf_sock_addr {
	__u32 user_family;
	__u32 user_ip4;    /* network order */
	__u32 user_ip6[4]; /* network order */
	__u32 user_port;   /* network order, in 16 bits */
	__u32 family, type, protocol;
	__u32 msg_src_ip4;
	__u32 msg_src_ip6[4];
	struct bpf_sock *sk __attribute__((aligned(8)));
};

struct bpf_sock_ops {
	__u32 op;
	__u32 args[4];
	__u32 family;
	__u32 remote_ip4, local_ip4;
	__u32 remote_ip6[4], local_ip6[4];
	__u32 remote_port; /* network order, in the upper half on little endian */
	__u32 local_port;  /* host order */
	__u32 is_fullsock;
	__u32 snd_cwnd, srtt_us, bpf_sock_ops_cb_flags, state, rtt_min, snd_ssthresh;
	__u32 rcv_nxt, snd_nxt, snd_una, mss_cache, ecn_flags, rate_delivered, rate_interval_us;
	__u32 packets_out, retrans_out, total_retrans, segs_in, data_segs_in, segs_out;
	__u32 data_segs_out, lost_out, sacked_out, sk_txhash;
	__u64 bytes_received, bytes_acked;
	struct bpf_sock *sk __attribute__((aligned(8)));
};

struct bpf_sockopt {
	struct bpf_sock *sk __attribute__((aligned(8)));
	void *optval __attribute__((aligned(8)));
	void *optval_end __attribute__((aligned(8)));
	int level, optname, optlen, retval;
};

struct bpf_sk_lookup {
	__u64 cookie;
	__u32 family, protocol;
	__u32 remote_ip4;
	__u32 remote_ip6[4];
	__u16 remote_port; /* network order */
	__u16 : 16;
	__u32 local_ip4;
	__u32 local_ip6[4];
	__u32 local_port; /* host order */
	__u32 ingress_ifindex;
};

struct bpf_sock_tuple {
	union {
		struct {
			__u32 saddr, daddr;
			__u16 sport, dport;
		} ipv4;
		struct {
			__u32 saddr[4], daddr[4];
			__u16 sport, dport;
		} ipv6;
	};
};

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value,
				   __u64 flags) = (void *)2;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static __u64 (*bpf_get_current_uid_gid)(void) = (void *)15;
static __u64 (*bpf_get_socket_cookie)(void *ctx) = (void *)46;
static long (*bpf_setsockopt)(void *ctx, int level, int name, void *value,
			      int length) = (void *)49;
static long (*bpf_bind)(void *ctx, void *address, int length) = (void *)64;
static long (*bpf_sock_hash_update)(void *ctx, void *map, void *key, __u64 flags) = (void *)70;
static struct bpf_sock *(*bpf_sk_lookup_tcp)(void *ctx, struct bpf_sock_tuple *tuple, __u32 size,
					     __u64 netns, __u64 flags) = (void *)84;
static long (*bpf_sk_release)(void *sock) = (void *)86;
static void *(*bpf_sk_storage_get)(void *map, void *sk, void *value, __u64 flags) = (void *)107;
static __u64 (*bpf_get_current_ancestor_cgroup_id)(int level) = (void *)123;
static long (*bpf_sk_storage_delete)(void *map, void *sk) = (void *)108;
static __u64 (*bpf_get_netns_cookie)(void *ctx) = (void *)122;
static long (*bpf_sk_assign)(void *ctx, void *sk, __u64 flags) = (void *)124;
