/* Where the guest begins: in long mode, at privilege level 3, with 4 GiB mapped as they are. */
	.globl	_start
	.section .start, "ax"
_start:
	mov	$0x200000, %rsp
	xor	%ebp, %ebp
	call	main
	ud2
