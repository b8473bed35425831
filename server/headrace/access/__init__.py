"""Who may call what, how often: callers with keys, roles and limits. Pure but for the file that names them."""
