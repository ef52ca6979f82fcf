/* The oldest kernel that the programs run on; nothing in them asks for it. */
#define LINUX_VERSION_CODE 0x050f00
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
