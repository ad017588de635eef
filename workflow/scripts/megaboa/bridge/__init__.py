"""The only code that knows Megatron-Bridge. It runs where ranks run, in the image if there is one."""
