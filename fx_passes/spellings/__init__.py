"""Which function, method, module or overload is which operation of the vocabulary."""
