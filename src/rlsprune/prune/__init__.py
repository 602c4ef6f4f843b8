"""Choice and removal of channels while training goes on."""
