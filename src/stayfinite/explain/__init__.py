"""Why it happened: the causes, the rules that name one, and the experiments that prove it."""
