// A real client-go informer, watched closely.
//
// It keeps a store of ConfigMaps as any Go operator does, and checks every event on its way in: no object may go back
// in time, appear twice or vanish without a word. On each line "state" on standard input it answers with one line of
// JSON: what the store holds, how often it listed and watched, and what was wrong.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

// witness sees every event before the store does.
type witness struct {
	sync.Mutex
	lists   int
	watches int
	events  int
	wrong   []string
	// The version in which each object is there, as far as this watch has told.
	present map[string]uint64
	// The newest version that the watch has told of.
	newest uint64
	// An object, and every version of it that the watch has told of.
	closely  string
	versions []uint64
}

func (w *witness) complain(format string, arguments ...any) {
	if len(w.wrong) < 20 {
		w.wrong = append(w.wrong, fmt.Sprintf(format, arguments...))
	}
}

func version(object metav1.Object) uint64 {
	version, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0
	}
	return version
}

func (w *witness) listed(list *corev1.ConfigMapList) {
	w.Lock()
	defer w.Unlock()
	w.lists++
	w.present = map[string]uint64{}
	for i := range list.Items {
		w.present[list.Items[i].Name] = version(&list.Items[i])
	}
	w.newest, _ = strconv.ParseUint(list.ResourceVersion, 10, 64)
}

func (w *witness) saw(event watch.Event) {
	w.Lock()
	defer w.Unlock()
	w.events++
	object, ok := event.Object.(metav1.Object)
	if !ok {
		w.complain("%s without an object: %v", event.Type, event.Object)
		return
	}
	at, name := version(object), object.GetName()
	before, there := w.present[name]
	switch event.Type {
	case watch.Added:
		if there {
			w.complain("%s at %d added, but it was there since %d", name, at, before)
		}
		w.present[name] = at
	case watch.Modified:
		if !there {
			w.complain("%s at %d modified, but it was not there", name, at)
		} else if at <= before {
			w.complain("%s went back from %d to %d", name, before, at)
		}
		w.present[name] = at
	case watch.Deleted:
		if !there {
			w.complain("%s at %d deleted, but it was not there", name, at)
		}
		delete(w.present, name)
	case watch.Bookmark:
		if at < w.newest {
			w.complain("a bookmark went back from %d to %d", w.newest, at)
		}
	default:
		w.complain("%s: %v", event.Type, event.Object)
	}
	if at > w.newest {
		w.newest = at
	}
	if name == w.closely && event.Type != watch.Bookmark {
		w.versions = append(w.versions, at)
	}
}

// watched lets the witness see every event of a watch.
func (w *witness) watched(from watch.Interface) watch.Interface {
	w.Lock()
	w.watches++
	w.Unlock()
	return watch.Filter(from, func(event watch.Event) (watch.Event, bool) {
		w.saw(event)
		return event, true
	})
}

type state struct {
	Store   map[string]string `json:"store"`
	Lists   int               `json:"lists"`
	Watches int               `json:"watches"`
	Events  int               `json:"events"`
	Wrong   []string          `json:"wrong"`
	Closely []uint64          `json:"closely"`
}

func main() {
	server := flag.String("server", "", "URL of the API server, or of a proxy before it; a kubeconfig says it where this does not")
	ca := flag.String("ca", "", "file with the CA to believe")
	token := flag.String("token", "", "bearer token")
	namespace := flag.String("namespace", "", "whose ConfigMaps")
	contentType := flag.String("content-type", runtime.ContentTypeProtobuf, "what to ask for")
	closely := flag.String("closely", "", "the ConfigMap of which every version is told")
	http1 := flag.Bool("http1", false, "speak HTTP/1.1")
	flag.Parse()

	config := &rest.Config{Host: *server, BearerToken: *token}
	config.TLSClientConfig.CAFile = *ca
	if *server == "" {
		found, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			clientcmd.NewDefaultClientConfigLoadingRules(), nil).ClientConfig()
		if err != nil {
			log.Fatal(err)
		}
		config = found
	}
	config.QPS = -1
	config.ContentType = *contentType
	if *http1 {
		config.TLSClientConfig.NextProtos = []string{"http/1.1"}
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal(err)
	}
	maps := client.CoreV1().ConfigMaps(*namespace)
	seen := &witness{present: map[string]uint64{}, closely: *closely}
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := maps.List(ctx, options)
			if err == nil {
				seen.listed(list)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			from, err := maps.Watch(ctx, options)
			if err != nil {
				return nil, err
			}
			return seen.watched(from), nil
		},
	}
	// Lists, then watches: the witness knows where each watch begins.
	informer := cache.NewSharedIndexInformer(listsFirst{source}, &corev1.ConfigMap{}, 0, cache.Indexers{})
	go informer.RunWithContext(context.Background())
	for !informer.HasSynced() {
		time.Sleep(10 * time.Millisecond)
	}
	fmt.Println(`{"synced":true}`)

	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		answer := state{Store: map[string]string{}, Wrong: []string{}, Closely: []uint64{}}
		for _, object := range informer.GetStore().List() {
			configMap := object.(*corev1.ConfigMap)
			answer.Store[configMap.Name] = configMap.ResourceVersion
		}
		seen.Lock()
		answer.Lists, answer.Watches, answer.Events = seen.lists, seen.watches, seen.events
		answer.Wrong = append(answer.Wrong, seen.wrong...)
		answer.Closely = append(answer.Closely, seen.versions...)
		seen.Unlock()
		if err := json.NewEncoder(os.Stdout).Encode(answer); err != nil {
			log.Fatal(err)
		}
	}
}

// listsFirst keeps the reflector from asking for a list in the form of a watch.
type listsFirst struct {
	*cache.ListWatch
}

func (listsFirst) IsWatchListSemanticsUnSupported() bool {
	return true
}
