"""Models of other servers made into models of this one: `headrace import`."""
