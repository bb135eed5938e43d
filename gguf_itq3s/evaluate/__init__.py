"""KL divergence and perplexity of every type on a text: which rows, by which tools, in which tables and plots."""
