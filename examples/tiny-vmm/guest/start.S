/* The guest starts here: in long mode, at privilege level 3, with 4 GiB mapped one to one. */
	.globl	_start
	.section .start, "ax"
_start:
	mov	$stack_top, %rsp
	xor	%ebp, %ebp
	call	main
	ud2
