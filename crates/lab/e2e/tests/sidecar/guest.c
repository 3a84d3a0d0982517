// A virtual machine's guest without an operating system (multiboot, 32 bits): fills 96 MiB, checks
// and changes them in two rounds, prints on the serial line how many words were wrong, and powers
// the machine off.
// gcc -m32 -O1 -ffreestanding -nostdlib -static -fno-pie -no-pie -fno-stack-protector -Wl,-Ttext=0x200000
#include <stdint.h>

enum { FIRST = 16 << 20, WORDS = (96 << 20) / 4, STRIDE = 64, ROUNDS = 2 };

__attribute__((section(".multiboot"), used, aligned(4)))
static const uint32_t header[3] = {0x1badb002, 0, -0x1badb002u};

static char stack[4096] __attribute__((used, aligned(16)));

static void say(const char *text) {
    for (; *text; text++) __asm__ volatile("outb %0, %1" ::"a"(*text), "Nd"((uint16_t)0x3f8));
}

static uint32_t word(uint32_t at, uint32_t round) {
    uint32_t x = at * 2654435761u + round * 40503u;
    return x ^ x >> 15;
}

static void run(void) {
    volatile uint32_t *memory = (volatile uint32_t *)FIRST;
    uint32_t wrong = 0;
    for (uint32_t at = 0; at < WORDS; at += STRIDE) memory[at] = word(at, 0);
    for (uint32_t round = 0; round < ROUNDS; round++)
        for (uint32_t at = 0; at < WORDS; at += STRIDE) {
            if (memory[at] != word(at, round)) wrong++;
            memory[at] = word(at, round + 1);
        }
    char digits[16], *text = digits + 15;
    *text = 0;
    do *--text = '0' + wrong % 10;
    while (wrong /= 10);
    say(text);
    say(" wrong\n");
    // Powers off QEMU's machine through ACPI.
    __asm__ volatile("outw %0, %1" ::"a"((uint16_t)0x2000), "Nd"((uint16_t)0x604));
    for (;;) __asm__ volatile("hlt");
}

__attribute__((naked, used)) void _start(void) {
    __asm__ volatile("mov $stack + 4096, %%esp\n call %P0\n" ::"i"(run));
}
