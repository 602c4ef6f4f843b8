"""Everything that decides the numbers of a run. Light to import: no torch."""
