// A Go host: goroutines that allocate, compute and check without end; "ok" if all was right.
package main

import (
	"bufio"
	"fmt"
	"os"
	"sync/atomic"
)

var wrong atomic.Int64
var done atomic.Bool

func churn(seed uint64) {
	for !done.Load() {
		words := make([]uint64, 1<<12)
		for i := range words {
			words[i] = seed ^ uint64(i)*0x9E3779B97F4A7C15
		}
		for i, word := range words {
			if word != seed^uint64(i)*0x9E3779B97F4A7C15 {
				wrong.Add(1)
			}
		}
		seed++
	}
}

func main() {
	finished := make(chan bool)
	for i := range 4 {
		go func() { churn(uint64(i)); finished <- true }()
	}
	fmt.Println("ready")
	bufio.NewReader(os.Stdin).ReadString('\n')
	done.Store(true)
	for range 4 {
		<-finished
	}
	if wrong.Load() == 0 {
		fmt.Println("ok")
	} else {
		fmt.Println("bad:", wrong.Load())
	}
}
