"""Which version of a model a request gets that names none: shares, stickiness, shadows, and taking a bad version back."""
