"""Memory: blocks, block tables and the prefix cache."""
