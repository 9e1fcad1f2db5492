"""How models write down what they think and which tools they call, and how that is read while it comes."""
