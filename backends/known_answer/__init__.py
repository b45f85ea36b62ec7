"""The known-answer check: inputs, the CPU's answers to them, and a rule for each precision."""
