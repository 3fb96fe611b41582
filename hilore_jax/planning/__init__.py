"""Planning: which policy each block gets, within budgets of memory and gradient error."""
