"""From logits to tokens: filters, drawing, and grammar masks."""
