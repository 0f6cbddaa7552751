"""Beside: machines of their own, of which a step asks and which know no state."""
