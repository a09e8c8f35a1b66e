/* The second guest: real mode, counts interrupts of line 5, and messages with vector 0x26. At 0x1000; the host looks at
 * the words below.
 *
 *   0x500  interrupts that the handler saw
 *   0x504  1 once interrupts are taken
 *   0x508  the host writes 1: end with the next interrupt
 */
	.code16
	.globl	_start
_start:
	xorw	%ax, %ax
	movw	%ax, %ds
	movw	%ax, %ss
	movw	$0x4000, %sp
	/* Line 5 is vector 0x25: handler and segment. */
	movw	$handler, 0x94
	movw	%ax, 0x96
	/* The first interrupt controller: vectors from 0x20 on, a second one on line 2, 8086 mode, line 5 alone. */
	movb	$0x11, %al
	outb	%al, $0x20
	movb	$0x20, %al
	outb	%al, $0x21
	movb	$0x04, %al
	outb	%al, $0x21
	movb	$0x01, %al
	outb	%al, $0x21
	movb	$0xdf, %al
	outb	%al, $0x21
	/* Messages: vector 0x26. The local controller is on, in x2APIC mode, whose registers are reached from here. */
	movw	$message_handler, 0x98
	movw	$0, 0x9a
	movl	$0x1b, %ecx
	rdmsr
	orl	$0xc00, %eax
	wrmsr
	movl	$0x80f, %ecx
	movl	$0x1ff, %eax
	xorl	%edx, %edx
	wrmsr
	movl	$1, 0x504
again:
	sti
	hlt
	cli
	cmpl	$0, 0x508
	je	again
	outb	%al, $0xf4
stop:
	jmp	stop

handler:
	pushw	%ax
	incl	0x500
	movb	$0x20, %al
	outb	%al, $0x20
	popw	%ax
	iret

message_handler:
	pushl	%eax
	pushl	%ecx
	pushl	%edx
	incl	0x500
	/* End of interrupt. */
	movl	$0x80b, %ecx
	xorl	%eax, %eax
	xorl	%edx, %edx
	wrmsr
	popl	%edx
	popl	%ecx
	popl	%eax
	iretw
