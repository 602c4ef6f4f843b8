"""Algorithm 1 of the paper, slow and in float64: what the package is compared with.

Nothing here imports the package, and nothing here is clever: each line stands beside an equation.
"""
