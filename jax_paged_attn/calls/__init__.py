"""The calls that implementations serve: for each, what is static about it, its operands, its vmapped form."""
