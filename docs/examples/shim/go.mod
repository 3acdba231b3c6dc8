module example.org/shim

go 1.21
