// Command main says what Go's package regexp makes of expressions.
//
// The first line holds texts, every further line an expression, all in hexadecimal, the texts with spaces between them. The
// answer to each expression is a line: "refused", or for each text 0 (nothing in it matches), 1 (something does) or 2 (all
// of it does).
package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"regexp"
	"strings"
)

func decoded(word string) string {
	text, err := hex.DecodeString(word)
	if err != nil {
		panic(err)
	}
	return string(text)
}

func answer(expression string, texts []string) string {
	compiled, err := regexp.Compile(expression)
	if err != nil {
		return "refused"
	}
	// The longest that begins first is all of it, if anything is.
	compiled.Longest()
	var said strings.Builder
	for _, text := range texts {
		found := compiled.FindStringIndex(text)
		switch {
		case found == nil:
			said.WriteByte('0')
		case found[0] == 0 && found[1] == len(text):
			said.WriteByte('2')
		default:
			said.WriteByte('1')
		}
	}
	return said.String()
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<24)
	lines.Scan()
	var texts []string
	for _, word := range strings.Split(lines.Text(), " ") {
		texts = append(texts, decoded(word))
	}
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for lines.Scan() {
		fmt.Fprintln(out, answer(decoded(lines.Text()), texts))
	}
}
