// A group member over nats.go, written for these tests from the wire facts: another client library that reads the same
// records, asks for the same consumers and obeys the same pins. It is no copy of the reference, and heals nothing.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const priorityGroup = "PCG"

type mapping struct {
	Member     string `json:"member"`
	Partitions []int  `json:"partitions"`
}

type partitioning struct {
	Filter    string `json:"filter"`
	Wildcards []int  `json:"partitioning_wildcards"`
}

type record struct {
	MaxMembers   uint           `json:"max_members"`
	Filters      []string       `json:"filters,omitempty"`
	Partitioning []partitioning `json:"partitioning_filters"`
	Members      []string       `json:"members,omitempty"`
	Mappings     []mapping      `json:"member_mappings,omitempty"`
}

func (r record) partitions(member string) []int {
	var own []int
	if len(r.Members) == 0 {
		for _, each := range r.Mappings {
			if each.Member == member {
				own = append(own, each.Partitions...)
			}
		}
		return own
	}
	names := slices.Clone(r.Members)
	sort.Strings(names)
	names = slices.Compact(names)
	count := int(r.MaxMembers)
	if len(names) > count {
		names = names[:count]
	}
	size := count / len(names)
	for k, name := range names {
		if name == member {
			for p := k * size; p < (k+1)*size; p++ {
				own = append(own, p)
			}
			if rest := len(names)*size + k; rest < count {
				own = append(own, rest)
			}
		}
	}
	return own
}

func (r record) filters(member string) []string {
	base := slices.Clone(r.Filters)
	for _, each := range r.Partitioning {
		base = append(base, each.Filter)
	}
	if len(base) == 0 || len(r.Members) == 0 {
		base = []string{">"}
	}
	var out []string
	for _, filter := range base {
		for _, p := range r.partitions(member) {
			out = append(out, fmt.Sprintf("%d.%s", p, filter))
		}
	}
	return out
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		os.Exit(1)
	}
}

func say(kind string, fields map[string]any) {
	fields["type"] = kind
	line, _ := json.Marshal(fields)
	fmt.Println(string(line))
}

type member struct {
	js             jetstream.JetStream
	elastic        bool
	stream, name   string
	listed         string
	consuming      jetstream.ConsumeContext
	lastPin        atomic.Value
	ackWait, sleep time.Duration
}

func (m *member) join(ctx context.Context, filters []string) error {
	config := jetstream.ConsumerConfig{
		FilterSubjects: filters,
		AckPolicy:      jetstream.AckExplicitPolicy,
		AckWait:        m.ackWait,
		MaxAckPending:  1,
		PriorityPolicy: jetstream.PriorityPolicyPinned,
		PriorityGroups: []string{priorityGroup},
		PinnedTTL:      max(m.ackWait, time.Second),
	}
	if m.elastic {
		config.Name, config.InactiveThreshold = m.name, m.ackWait
	} else {
		config.Durable = m.name
	}
	consumer, err := m.js.CreateConsumer(ctx, m.stream, config)
	if err != nil {
		return err
	}
	expiry := max(m.ackWait/2, time.Second)
	m.consuming, err = consumer.Consume(func(msg jetstream.Msg) {
		m.lastPin.Store(msg.Headers().Get("Nats-Pin-Id"))
		_, subject, _ := strings.Cut(msg.Subject(), ".")
		say("message", map[string]any{"subject": subject, "data": string(msg.Data())})
		time.Sleep(m.sleep)
		if err := msg.DoubleAck(ctx); err != nil {
			say("ack_failed", map[string]any{"error": err.Error()})
		}
	}, jetstream.PullPriorityGroup(priorityGroup), jetstream.PullExpiry(expiry), jetstream.PullHeartbeat(expiry/2))
	if err == nil {
		say("joined", map[string]any{"filters": filters})
	}
	return err
}

func (m *member) pinned(ctx context.Context) bool {
	consumer, err := m.js.Consumer(ctx, m.stream, m.name)
	if err != nil {
		return false
	}
	info, err := consumer.Info(ctx)
	if err != nil {
		return false
	}
	own, _ := m.lastPin.Load().(string)
	return own != "" && len(info.PriorityGroups) > 0 && info.PriorityGroups[0].PinnedClientID == own
}

func (m *member) change(ctx context.Context, filters []string) {
	pinned := false
	if m.consuming != nil {
		pinned = m.pinned(ctx)
		m.consuming.Stop()
		m.consuming = nil
	}
	if pinned {
		_ = m.js.DeleteConsumer(ctx, m.stream, m.name)
	} else {
		time.Sleep(450 * time.Millisecond)
	}
	m.tryJoin(ctx, filters)
}

func (m *member) tryJoin(ctx context.Context, filters []string) {
	if len(filters) == 0 {
		return
	}
	err := m.join(ctx, filters)
	if errors.Is(err, jetstream.ErrConsumerExists) {
		_ = m.js.DeleteConsumer(ctx, m.stream, m.name)
		err = m.join(ctx, filters)
	}
	if err != nil {
		say("retry", map[string]any{"error": err.Error()})
	}
}

func consume(ctx context.Context, js jetstream.JetStream, kind, stream, group, name string) {
	bucket, err := js.KeyValue(ctx, kind+"-consumer-groups")
	check(err)
	m := &member{js: js, elastic: kind == "elastic", stream: stream, listed: name, ackWait: 2 * time.Second}
	m.sleep = 2 * time.Millisecond
	m.name = group + "-" + name
	if m.elastic {
		m.stream, m.name = stream+"-"+group, name
	}
	watch, err := bucket.Watch(ctx, stream+"."+group)
	check(err)
	var held record
	var previous string
	timer := time.NewTicker(m.ackWait + 500*time.Millisecond)
	for {
		select {
		case <-ctx.Done():
			if m.consuming != nil {
				m.consuming.Stop()
			}
			return
		case entry := <-watch.Updates():
			if entry == nil {
				continue
			}
			if entry.Operation() != jetstream.KeyValuePut {
				say("deleted", map[string]any{})
				return
			}
			held = record{}
			check(json.Unmarshal(entry.Value(), &held))
			if previous == "" {
				m.tryJoin(ctx, held.filters(name))
			} else if previous != string(entry.Value()) {
				m.change(ctx, held.filters(name))
			}
			previous = string(entry.Value())
		case <-timer.C:
			if m.consuming == nil {
				m.tryJoin(ctx, held.filters(name))
			}
		}
	}
}

func createElastic(ctx context.Context, js jetstream.JetStream, stream, group string, count int, filter string, index int) {
	source, err := js.Stream(ctx, stream)
	check(err)
	info := source.CachedInfo()
	bucket, err := js.KeyValue(ctx, "elastic-consumer-groups")
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		bucket, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket: "elastic-consumer-groups", Storage: jetstream.FileStorage, Replicas: info.Config.Replicas,
		})
	}
	check(err)
	made := record{MaxMembers: uint(count), Partitioning: []partitioning{{filter, []int{index}}}}
	raw, err := json.Marshal(made)
	check(err)
	if _, err := bucket.Get(ctx, stream+"."+group); errors.Is(err, jetstream.ErrKeyNotFound) {
		_, err = bucket.Put(ctx, stream+"."+group, raw)
		check(err)
	}
	dest, star := []string{fmt.Sprintf("{{Partition(%d,%d)}}", count, index)}, 0
	for _, token := range strings.Split(filter, ".") {
		if token == "*" {
			star++
			token = fmt.Sprintf("{{Wildcard(%d)}}", star)
		}
		dest = append(dest, token)
	}
	_, err = js.CreateStream(ctx, jetstream.StreamConfig{
		Name: stream + "-" + group, Retention: jetstream.WorkQueuePolicy, Discard: jetstream.DiscardNew,
		Storage: info.Config.Storage, Replicas: info.Config.Replicas, AllowDirect: true,
		Sources: []*jetstream.StreamSource{{Name: stream, SubjectTransforms: []jetstream.SubjectTransformConfig{
			{Source: filter, Destination: strings.Join(dest, ".")},
		}}},
	})
	check(err)
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	connection, err := nats.Connect(os.Args[1])
	check(err)
	defer connection.Close()
	js, err := jetstream.New(connection)
	check(err)
	args := os.Args[3:]
	switch os.Args[2] {
	case "consume":
		consume(ctx, js, args[0], args[1], args[2], args[3])
	case "create":
		count, err := strconv.Atoi(args[2])
		check(err)
		createElastic(ctx, js, args[0], args[1], count, args[3], 1)
	case "delete":
		bucket, err := js.KeyValue(ctx, "elastic-consumer-groups")
		check(err)
		check(bucket.Delete(ctx, args[0]+"."+args[1]))
		check(js.DeleteStream(ctx, args[0]+"-"+args[1]))
	}
}
