"""Which models are in memory where not all of them fit: loading on demand and evicting the least recently used."""
