"""Research behind claims of the documentation: each file trains or measures what the table of a page shows."""
