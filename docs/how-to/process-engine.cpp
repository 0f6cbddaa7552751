// A scheduler with a paged prefix cache in C++17, held to Blockstep through lines of JSON.
//
//     g++ -std=c++17 -O2 -o process-engine process-engine.cpp
//     blockstep check --engine cmd:./process-engine
//
// It is an example of the protocol and of the core: continuous batching, chunked prefill, a prefix
// cache with reference counts and lazy eviction, preemption of the request that was admitted last.
// One full-attention KV group, one plan in flight, no drafts. Everything stands in one file so that
// it can be read from top to bottom: JSON, blocks, requests, the step, the protocol.

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

using Ints = std::vector<long>;

// ---- JSON: the part of it that the protocol needs. Numbers are integers.

struct Json {
    enum Kind { Null, Bool, Number, Text, List, Object } kind = Null;
    long number = 0;
    std::string text;
    std::string raw;  // as it was read, so that a request can be sent back
    std::vector<Json> items;
    std::map<std::string, Json> fields;

    const Json& operator[](const std::string& name) const {
        static const Json nothing;
        auto found = fields.find(name);
        return found == fields.end() ? nothing : found->second;
    }
    bool is_null() const { return kind == Null; }
    Ints numbers() const {
        Ints found;
        for (const Json& item : items) found.push_back(item.number);
        return found;
    }
};

class Parser {
  public:
    explicit Parser(const std::string& line) : line_(line) {}
    Json parse() {
        skip();
        const size_t start = at_;
        Json value;
        const char next = peek();
        if (next == '{') {
            value.kind = Json::Object;
            for (++at_; more('}');) {
                std::string name = parse_text();
                expect(':');
                value.fields[name] = parse();
            }
        } else if (next == '[') {
            value.kind = Json::List;
            for (++at_; more(']');) value.items.push_back(parse());
        } else if (next == '"') {
            value.kind = Json::Text;
            value.text = parse_text();
        } else if (word("true") || word("false")) {
            value.kind = Json::Bool;
            value.number = next == 't';
        } else if (!word("null")) {
            value.kind = Json::Number;
            char* end = nullptr;
            value.number = std::strtol(line_.c_str() + at_, &end, 10);
            const size_t last = end - line_.c_str();
            if (last == at_) throw std::runtime_error("no JSON value at byte " + std::to_string(at_));
            at_ = last;
        }
        value.raw = line_.substr(start, at_ - start);
        return value;
    }

  private:
    char peek() const { return at_ < line_.size() ? line_[at_] : '\0'; }
    void skip() {
        while (at_ < line_.size() && std::isspace(static_cast<unsigned char>(line_[at_]))) ++at_;
    }
    void expect(char wanted) {
        skip();
        if (peek() != wanted) throw std::runtime_error(std::string("expected ") + wanted);
        ++at_;
        skip();
    }
    bool word(const std::string& wanted) {
        if (line_.compare(at_, wanted.size(), wanted)) return false;
        at_ += wanted.size();
        return true;
    }
    bool more(char closing) {  // is there another item before the closing bracket?
        skip();
        if (peek() == ',') ++at_, skip();
        if (peek() == '\0') throw std::runtime_error("the line ends too early");
        if (peek() != closing) return true;
        ++at_;
        return false;
    }
    std::string parse_text() {  // escapes are kept as they are: names are only compared and echoed
        skip();
        std::string text;
        for (++at_; peek() != '"'; ++at_) {
            if (peek() == '\0') throw std::runtime_error("a text without an end");
            if (peek() == '\\') text += line_[at_++];
            text += line_[at_];
        }
        ++at_;
        return text;
    }
    const std::string& line_;
    size_t at_ = 0;
};

std::string quote(const std::string& text) { return '"' + text + '"'; }

template <class Items, class Write>
std::string list(const Items& items, Write write) {
    std::string out = "[";
    for (const auto& item : items) out += (out.size() > 1 ? "," : "") + write(item);
    return out + "]";
}
std::string list(const Ints& items) {
    return list(items, [](long item) { return std::to_string(item); });
}
template <class Names>
std::string names(const Names& items) {
    return list(items, quote);
}

// ---- Blocks: reference counts, the queue of free blocks, and the map of what can be found.

using Name = std::tuple<long, Ints, std::string, std::string>;  // parent, tokens, adapter, salt

class Keys {  // numbers for keys: equal chains have equal numbers
  public:
    long number_of(const Name& name) {
        auto [found, is_new] = numbers_.try_emplace(name, static_cast<long>(chains_.size()));
        if (is_new) {
            const auto& [parent, tokens, adapter, salt] = name;
            std::string link = "{\"token_ids\":" + list(tokens);
            if (!adapter.empty()) link += ",\"adapter\":" + adapter;
            if (!salt.empty()) link += ",\"cache_salt\":" + salt;
            chains_.push_back((parent < 0 ? "" : chains_[parent] + ",") + link + "}");
        }
        return found->second;
    }
    std::string chain(long key) const { return key < 0 ? "null" : "[" + chains_[key] + "]"; }

  private:
    std::map<Name, long> numbers_;
    std::vector<std::string> chains_;
};

class Pool {
  public:
    explicit Pool(long num_blocks) : refs(num_blocks, 0), keys(num_blocks, -1) {
        for (long block = 1; block < num_blocks; ++block) free.push_back(block);  // 0 is null
    }
    // The blocks of the leading keys that can be found, of each key the one published first.
    Ints find(const Ints& wanted) const {
        Ints found;
        for (long key : wanted) {
            auto blocks = cached.find(key);
            if (blocks == cached.end()) break;
            found.push_back(blocks->second.front());
        }
        return found;
    }
    void hold(const Ints& blocks) {
        for (long block : blocks)
            if (refs[block]++ == 0) free.erase(std::find(free.begin(), free.end(), block));
    }
    Ints take(long count) {  // from the head: what was free longest is evicted first
        Ints blocks(free.begin(), free.begin() + count);
        free.erase(free.begin(), free.begin() + count);
        for (long block : blocks) refs[block] = 1, withdraw(block);
        return blocks;
    }
    void release(const Ints& table) {  // from the tail: the end of a prefix is evicted first
        for (auto block = table.rbegin(); block != table.rend(); ++block)
            if (--refs[*block] == 0) free.push_back(*block);
    }
    void publish(long block, long key) {
        keys[block] = key;
        cached[key].push_back(block);
    }
    void withdraw(long block) {
        const long key = keys[block];
        keys[block] = -1;
        if (key < 0) return;
        Ints& blocks = cached[key];
        blocks.erase(std::find(blocks.begin(), blocks.end(), block));
        if (blocks.empty()) cached.erase(key);
    }
    Ints refs, keys, free;
    std::map<long, Ints> cached;
};

// ---- Requests.

struct Request {
    std::string id, raw, adapter, salt, status = "waiting";
    Ints prompt, tokens, stops;  // tokens: the prompt and the outputs
    long max_tokens, min_tokens, eos;
    Json repetition;
    bool skips_cache = false, is_prefill_chunk = false;
    long computed = 0;  // leading tokens whose KV exists, or is written by the plan in flight
    long published = 0, num_cached_tokens = -1, num_preemptions = 0;
    Ints table, keys;

    explicit Request(const Json& json)
        : id(json["request_id"].text), raw(json.raw), prompt(json["prompt_token_ids"].numbers()),
          tokens(prompt), stops(json["stop_token_ids"].numbers()),
          max_tokens(json["max_tokens"].number), min_tokens(json["min_tokens"].number),
          eos(json["eos_token_id"].is_null() ? -1 : json["eos_token_id"].number),
          repetition(json["repetition_detection"]),
          skips_cache(json["skip_reading_prefix_cache"].number) {
        if (!json["adapter"].is_null()) adapter = json["adapter"].raw;
        if (!json["cache_salt"].is_null()) salt = json["cache_salt"].raw;
    }
    long known() const { return static_cast<long>(tokens.size()); }
    Ints outputs() const { return Ints(tokens.begin() + prompt.size(), tokens.end()); }

    // Take a sampled token; returns why the request ends with it, or "".
    std::string append(long token, long max_model_len) {
        tokens.push_back(token);
        const long num_outputs = known() - static_cast<long>(prompt.size());
        const bool may_stop = num_outputs >= min_tokens;
        if (may_stop && (token == eos || is_stop(token))) return "stop";
        if (num_outputs >= max_tokens || known() >= max_model_len) return "length";
        return may_stop && !repetition.is_null() && repeats() ? "repetition" : "";
    }
    bool is_stop(long token) const {
        return std::find(stops.begin(), stops.end(), token) != stops.end();
    }
    bool repeats() const {
        const long count = repetition["min_count"].number;
        const Ints said = outputs();
        for (long size = repetition["min_pattern_size"].number;
             size <= repetition["max_pattern_size"].number; ++size) {
            const long length = size * count, start = static_cast<long>(said.size()) - length;
            bool same = start >= 0;
            for (long at = size; same && at < length; ++at)
                same = said[start + at] == said[start + at - size];
            if (same) return true;
        }
        return false;
    }
};
using Ref = std::shared_ptr<Request>;

struct Row {
    Ref request;
    long start, count;  // tokens [start, start + count) run in this step
    Ints new_blocks;
    long published_before;
    bool is_new = false, resumed = false;
};

// ---- The scheduler.

class Scheduler {
  public:
    explicit Scheduler(const Json& config)
        : size_(config["block_size"].number), max_seqs_(config["max_num_seqs"].number),
          max_tokens_(config["max_num_batched_tokens"].number),
          max_model_len_(config["max_model_len"].number),
          threshold_(config["long_prefill_token_threshold"].number),
          caches_(config["enable_prefix_caching"].number),
          chunks_(config["enable_chunked_prefill"].number),
          reserves_(config["scheduler_reserve_full_isl"].number),
          pool_(config["num_blocks"].number) {}

    std::string submit(const Json& json) {
        Ref request = std::make_shared<Request>(json);
        requests_[request->id] = request;
        waiting_.push_back(request);
        return R"({"type":"Ack"})";
    }

    std::string abort(const Json& ids) {
        std::vector<std::string> aborted;
        for (const Json& id : ids.items) {
            auto found = requests_.find(id.text);
            if (found == requests_.end()) continue;
            Ref request = found->second;
            aborted.push_back(request->id);
            end(request);
        }
        return R"({"type":"Aborted","request_ids":)" + names(aborted) + "}";
    }

    std::string schedule() {
        rows_.clear();
        preempted_.clear();
        budget_ = max_tokens_;
        run_on();
        if (preempted_.empty()) admit();
        for (Row& row : rows_) {
            row.request->computed = row.start + row.count;
            row.request->is_prefill_chunk = row.request->computed < row.request->known();
        }
        const std::string plan = show_plan();
        ended_.clear();
        previous_.clear();
        for (const Row& row : rows_) previous_.insert(row.request->id);
        in_flight_ = rows_;
        if (!rows_.empty()) frame_ = next_frame_;
        ++next_frame_;
        return plan;
    }

    std::string commit(const Json& event) {
        std::map<std::string, Ints> sampled;
        for (const Json& row : event["sampled"].items)
            sampled[row["request_id"].text] = row["token_ids"].numbers();
        std::string out;
        for (const Row& row : in_flight_) {
            const Ref& request = row.request;
            auto found = requests_.find(request->id);
            const Ints& tokens = sampled[request->id];
            if (found == requests_.end() || found->second != request || tokens.empty()) continue;
            const std::string reason = request->append(tokens[0], max_model_len_);
            out += (out.empty() ? "" : ",") + show_output(*request, tokens[0], reason);
            if (!reason.empty()) end(request);
        }
        in_flight_.clear();
        frame_ = -1;
        return R"({"type":"Outputs","rows":[)" + out + "]}";
    }

    std::string snapshot() const;

  private:
    using Queue = std::vector<Ref>;
    static void remove(Queue& queue, const Ref& request) {
        queue.erase(std::remove(queue.begin(), queue.end(), request), queue.end());
    }

    // Requests that run, in order, as long as there is budget.
    void run_on() {
        const Queue before = running_;
        for (const Ref& request : before) {
            if (std::find(running_.begin(), running_.end(), request) == running_.end()) continue;
            if (!budget_) return;
            const long count = cap(request->known() - request->computed);
            if (!make_room(request, count)) return;
            give_row(request, std::min(count, budget_));
        }
    }
    long cap(long count) const {
        return std::min({count, threshold_ ? threshold_ : count, budget_});
    }
    long missing(const Request& request, long slots) const {
        const long wanted = (slots + size_ - 1) / size_;
        return std::max(wanted - static_cast<long>(request.table.size()), 0L);
    }
    long num_free() const { return static_cast<long>(pool_.free.size()); }

    // Preempt from the end of the running queue; false: the request itself was preempted.
    bool make_room(const Ref& request, long count) {
        while (missing(*request, request->computed + count) > num_free()) {
            const Ref victim = running_.back();
            take_back(victim);
            preempt(victim);
            if (victim == request) return false;
        }
        return true;
    }
    // The victim's row in this step, and the keys of blocks that will not be written.
    void take_back(const Ref& victim) {
        for (auto row = rows_.begin(); row != rows_.end(); ++row) {
            if (row->request != victim) continue;
            budget_ += row->count;
            for (long at = row->published_before; at < victim->published; ++at)
                pool_.withdraw(victim->table[at]);
            rows_.erase(row);
            return;
        }
    }
    void preempt(const Ref& victim) {
        running_.pop_back();
        give_up(*victim);
        victim->status = "preempted";
        ++victim->num_preemptions;
        ++num_preemptions_;
        preempted_.insert(victim->id);
        waiting_.insert(waiting_.begin(), victim);
    }
    void give_up(Request& request) {
        pool_.release(request.table);
        request.table.clear();
        request.published = request.computed = 0;
    }
    void end(const Ref& request) {
        remove(running_, request);
        remove(waiting_, request);
        give_up(*request);
        requests_.erase(request->id);
        ended_.insert(request->id);
    }

    // Requests that wait, in order, until one does not fit.
    void admit() {
        while (!waiting_.empty() && budget_ && static_cast<long>(running_.size()) < max_seqs_) {
            const Ref request = waiting_.front();
            const Ints hits = find_hits(*request);
            const long hit = static_cast<long>(hits.size()) * size_;
            long count = request->known() - hit;
            if (threshold_) count = std::min(count, threshold_);
            if (!chunks_ && count > budget_) return;
            count = std::min(count, budget_);
            const long slots = reserves_ ? request->known() : hit + count;
            long needed = std::max((slots + size_ - 1) / size_ - hit / size_, 0L);
            for (long block : hits) needed += pool_.refs[block] == 0;  // holding it uses it up
            if (needed > num_free()) return;
            if (caches_ && !request->skips_cache) queries_ += request->known(), hits_ += hit;
            pool_.hold(hits);
            request->table = hits;
            request->published = static_cast<long>(hits.size());
            request->computed = hit;
            if (request->num_cached_tokens < 0) request->num_cached_tokens = hit;
            request->status = "running";
            waiting_.erase(waiting_.begin());
            running_.push_back(request);
            Row& row = give_row(request, count);
            row.resumed = request->num_preemptions > 0;
            row.is_new = !row.resumed;
        }
    }
    // At least one token is left to compute, so that there is something to sample from.
    Ints find_hits(Request& request) {
        if (!caches_ || request.skips_cache) return {};
        return pool_.find(list_keys(request, (request.known() - 1) / size_));
    }
    Ints list_keys(Request& request, long count) {
        Ints& keys = request.keys;
        for (long at = static_cast<long>(keys.size()); at < count; ++at) {
            const auto first = request.tokens.begin() + at * size_;
            const std::string salt = at ? "" : request.salt;  // the chain carries it on
            keys.push_back(keys_.number_of(
                {at ? keys[at - 1] : -1, Ints(first, first + size_), request.adapter, salt}));
        }
        return Ints(keys.begin(), keys.begin() + count);
    }
    Row& give_row(const Ref& request, long count) {
        const long end = request->computed + count, published = request->published;
        const Ints blocks = pool_.take(missing(*request, end));
        request->table.insert(request->table.end(), blocks.begin(), blocks.end());
        if (caches_) {  // full blocks can be found as soon as a plan computes them
            const Ints keys = list_keys(*request, std::min(end, request->known()) / size_);
            for (; request->published < static_cast<long>(keys.size()); ++request->published)
                pool_.publish(request->table[request->published], keys[request->published]);
        }
        rows_.push_back({request, request->computed, count, blocks, published});
        budget_ -= count;
        return rows_.back();
    }

    // ---- What it says.

    std::string show_plan() const {
        std::string fresh, cached[2];  // requests that ran on, then those that were resumed
        for (const Row& row : rows_) {
            std::string& out = row.is_new ? fresh : cached[row.resumed];
            out += (out.empty() ? "" : ",") + (row.is_new ? show_new(row) : show_cached(row));
        }
        const std::string comma = cached[0].empty() || cached[1].empty() ? "" : ",";
        return R"({"type":"Plan","frame_id":)" + std::to_string(next_frame_) + R"(,"new":[)" +
               fresh + R"(],"cached":[)" + cached[0] + comma + cached[1] +
               R"(],"finished_req_ids":)" + names(ended_) + R"(,"preempted_req_ids":)" +
               names(preempted_) + "}";
    }
    static std::string show_new(const Row& row) {
        return "{\"request\":" + row.request->raw + ",\"block_ids\":[" + list(row.request->table) +
               "],\"num_computed_tokens\":" + std::to_string(row.start) +
               ",\"num_scheduled_tokens\":" + std::to_string(row.count) + "}";
    }
    std::string show_cached(const Row& row) const {
        const Request& request = *row.request;
        const bool is_known = previous_.count(request.id);  // the worker has its tokens
        return "{\"request_id\":" + quote(request.id) +
               ",\"resumed\":" + (row.resumed ? "true" : "false") + ",\"new_block_ids\":[" +
               list(row.resumed ? request.table : row.new_blocks) +
               "],\"all_token_ids\":" + (is_known ? "null" : list(request.tokens)) +
               ",\"num_computed_tokens\":" + std::to_string(row.start) +
               ",\"num_output_tokens\":" + std::to_string(request.known() - request.prompt.size()) +
               ",\"num_scheduled_tokens\":" + std::to_string(row.count) + "}";
    }
    static std::string show_output(const Request& request, long token, const std::string& reason) {
        const bool is_stop = reason == "stop" && token != request.eos;
        return "{\"request_id\":" + quote(request.id) + ",\"new_token_ids\":" + list(Ints{token}) +
               ",\"finish_reason\":" + (reason.empty() ? "null" : quote(reason)) +
               ",\"stop_token_id\":" + (is_stop ? std::to_string(token) : "null") +
               ",\"num_cached_tokens\":" + std::to_string(request.num_cached_tokens) + "}";
    }

    long size_, max_seqs_, max_tokens_, max_model_len_, threshold_;
    bool caches_, chunks_, reserves_;
    Keys keys_;
    Pool pool_;
    std::map<std::string, Ref> requests_;
    Queue waiting_, running_;
    std::vector<Row> rows_, in_flight_;
    std::set<std::string> preempted_, ended_, previous_;  // sets, since plans name them sorted
    long budget_ = 0, next_frame_ = 0, frame_ = -1;
    long queries_ = 0, hits_ = 0, num_preemptions_ = 0;
};

std::string Scheduler::snapshot() const {
    const auto id_of = [](const Ref& request) { return quote(request->id); };
    const auto show = [](const std::pair<const std::string, Ref>& one) {
        const Request& request = *one.second;
        return "{\"request_id\":" + quote(request.id) + ",\"status\":" + quote(request.status) +
               ",\"output_token_ids\":" + list(request.outputs()) +
               ",\"num_computed_tokens\":" + std::to_string(request.computed) +
               ",\"is_prefill_chunk\":" + (request.is_prefill_chunk ? "true" : "false") +
               ",\"block_tables\":[" + list(request.table) + "],\"num_cached_blocks\":[" +
               std::to_string(request.published) +
               "],\"num_cached_tokens\":" + std::to_string(request.num_cached_tokens) +
               ",\"num_preemptions\":" + std::to_string(request.num_preemptions) + "}";
    };
    const auto chain = [this](long key) { return keys_.chain(key); };
    const auto blocks = [](const std::pair<const long, Ints>& one) { return list(one.second); };
    return R"({"type":"Snapshot","state":{"pause_state":"unpaused","waiting":)" +
           list(waiting_, id_of) + ",\"skipped_waiting\":[],\"running\":" + list(running_, id_of) +
           ",\"requests\":" + list(requests_, show) + ",\"ref_counts\":" + list(pool_.refs) +
           ",\"free_queue\":" + list(pool_.free) + ",\"block_keys\":" + list(pool_.keys, chain) +
           ",\"cached\":" + list(pool_.cached, blocks) + ",\"frames_in_flight\":" +
           list(frame_ < 0 ? Ints{} : Ints{frame_}) +
           ",\"next_frame_id\":" + std::to_string(next_frame_) +
           ",\"finished_req_ids\":" + names(ended_) + ",\"prev_scheduled_req_ids\":" +
           names(previous_) + ",\"stats\":{\"prefix_cache_queries\":" + std::to_string(queries_) +
           ",\"prefix_cache_hits\":" + std::to_string(hits_) +
           ",\"preemptions\":" + std::to_string(num_preemptions_) + "},\"has_work\":" +
           (requests_.empty() && ended_.empty() ? "false" : "true") + "}}";
}

// ---- The protocol: one line in, one line out.

const char* const HELLO =
    R"({"type":"Hello","format":"blockstep-engine","version":1,"name":"process-engine.cpp",)"
    R"("engine_version":"1","equivalence":"exact",)"
    R"("capabilities":["snapshot","abort","statistics","cache statistics","work"]})";

int main() {
    std::ios::sync_with_stdio(false);
    std::unique_ptr<Scheduler> scheduler;
    for (std::string line; std::getline(std::cin, line);) {
        std::string answer;
        try {
            const Json event = Parser(line).parse();
            const std::string& type = event["type"].text;
            if (type == "Hello") {
                answer = HELLO;
            } else if (type == "Start") {
                scheduler = std::make_unique<Scheduler>(event["config"]);
                answer = R"({"type":"Started"})";
            } else if (!scheduler) {
                throw std::runtime_error("no Start yet");
            } else if (type == "Submit") {
                answer = scheduler->submit(event["request"]);
            } else if (type == "Schedule") {
                answer = scheduler->schedule();
            } else if (type == "Commit") {
                answer = scheduler->commit(event);
            } else if (type == "Abort") {
                answer = scheduler->abort(event["request_ids"]);
            } else if (type == "Snapshot") {
                answer = scheduler->snapshot();
            } else {
                throw std::runtime_error("this engine takes no " + type);
            }
        } catch (const std::exception& error) {
            answer = R"({"type":"Fault","detail":")" + std::string(error.what()) + "\"}";
        }
        std::cout << answer << '\n' << std::flush;
    }
}
