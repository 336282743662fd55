/* malloc for tests: each block of SMALLEST bytes or more ends right before pages that nobody may touch.

   Reading or writing beyond its end ends the process (SIGSEGV), and so does touching it after free(): addresses are
   not used twice. Up to 15 bytes behind a block go unseen, or as many as its alignment leaves. Loaded by LD_PRELOAD.

   reserved: [ no access | block 1 | no access | block 2 | no access | ... ]
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALLEST 1024
#define RESERVED (8ULL << 40)
#define PAGE 4096ULL

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static char *base;          /* of the reserved addresses, NULL before there are any */
static uint64_t *lengths;   /* page number of a block's first byte -> pages from its first page on */
static uint64_t *firsts;    /* page number of a block's first byte -> its first page */
static uint64_t used_pages, guarded, plain;
static int has_failed;

static void reserve(void) {
    static int lock;
    while (__sync_lock_test_and_set(&lock, 1)) {}
    if (!base && !has_failed) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, access = PROT_READ | PROT_WRITE;
        size_t table = RESERVED / PAGE * sizeof(uint64_t);
        char *addresses = mmap(NULL, RESERVED, PROT_NONE, flags, -1, 0);
        lengths = mmap(NULL, table, access, flags, -1, 0);
        firsts = mmap(NULL, table, access, flags, -1, 0);
        has_failed = addresses == MAP_FAILED || lengths == MAP_FAILED || firsts == MAP_FAILED;
        if (!has_failed) {
            madvise(lengths, table, MADV_NOHUGEPAGE);
            madvise(firsts, table, MADV_NOHUGEPAGE);
            base = addresses;
        }
    }
    __sync_lock_release(&lock);
}

static uint64_t page_of(const void *block) { return ((const char *)block - base) / PAGE; }

static int is_guarded(const void *block) {
    return base && (const char *)block >= base && (const char *)block < base + RESERVED;
}

/* NULL where the kernel gives no more mappings: then the C library's own malloc is asked. */
static void *guard(size_t alignment, size_t size) {
    if (!base) reserve();
    if (has_failed || alignment > PAGE || size > RESERVED / 2) return NULL;
    if (alignment < 16) alignment = 16;
    uint64_t pages = (size + PAGE - 1) / PAGE, first = __sync_fetch_and_add(&used_pages, pages + 1) + 1;
    if ((first + pages + 1) * PAGE > RESERVED) return NULL;
    char *start = base + first * PAGE;
    if (mprotect(start, pages * PAGE, PROT_READ | PROT_WRITE)) {
        __sync_fetch_and_add(&plain, 1);
        return NULL;
    }
    __sync_fetch_and_add(&guarded, 1);
    char *block = (char *)((uintptr_t)(start + pages * PAGE - size) & ~(alignment - 1));
    lengths[page_of(block)] = pages;
    firsts[page_of(block)] = first;
    return block;
}

static void forbid(void *block) {
    uint64_t page = page_of(block), pages = lengths[page];
    if (!pages) abort(); /* freed twice */
    char *start = base + firsts[page] * PAGE;
    lengths[page] = 0;
    madvise(start, pages * PAGE, MADV_DONTNEED);
    mprotect(start, pages * PAGE, PROT_NONE);
}

void *malloc(size_t size) {
    void *block = size >= SMALLEST ? guard(16, size) : NULL;
    return block ? block : __libc_malloc(size);
}

void free(void *block) {
    if (is_guarded(block)) forbid(block);
    else __libc_free(block);
}

void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
    void *block = bytes >= SMALLEST ? guard(16, bytes) : NULL;
    return block ? block : __libc_calloc(count, size);
}

void *memalign(size_t alignment, size_t size) {
    void *block = size >= SMALLEST ? guard(alignment, size) : NULL;
    return block ? block : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *block = memalign(alignment, size);
    if (!block) return ENOMEM;
    *result = block;
    return 0;
}

size_t malloc_usable_size(void *block) {
    static size_t (*next)(void *);
    if (!block) return 0;
    if (is_guarded(block)) {
        uint64_t page = page_of(block);
        return base + (firsts[page] + lengths[page]) * PAGE - (char *)block;
    }
    if (!next) next = (size_t(*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return next(block);
}

void *realloc(void *block, size_t size) {
    if (!block) return malloc(size);
    if (!is_guarded(block) && size < SMALLEST) return __libc_realloc(block, size);
    if (!size) {
        free(block);
        return NULL;
    }
    size_t before = malloc_usable_size(block);
    void *moved = malloc(size);
    if (!moved) return NULL;
    memcpy(moved, block, before < size ? before : size);
    free(block);
    return moved;
}

/* How many blocks were guarded, and how many the kernel had no mappings for: for tests of this file. */
uint64_t guarded_blocks(void) { return guarded; }
uint64_t plain_blocks(void) { return plain; }
