// One model, whole and in stages: the same numbers, to the bit.
//
// For each GGUF file that is given: the input of every layer, whatever rows are outputs; a stage at each side of every
// cut, and three stages; what is refused, and how. Uses the public header alone.

#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

using floats = std::vector<float>;

static const int32_t N_CTX    = 256;
static const int32_t N_UBATCH = 64;                       // a prompt is several of these
static const std::vector<int32_t> CALLS = { 100, 57, 1, 1 }; // tokens in each llama_decode

static int n_failed = 0;

#define CHECK(what, ...) do { if (!(what)) { printf("  FAIL %s:%d: %s ", __FILE__, __LINE__, #what); printf(__VA_ARGS__); printf("\n"); n_failed++; } } while (0)

// normalized mean squared error
static double nmse(const floats & a, const floats & b) {
    if (a.size() != b.size() || a.empty()) {
        return 1e30;
    }
    double diff = 0.0;
    double size = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        diff += double(a[i] - b[i])*double(a[i] - b[i]);
        size += double(a[i])*double(a[i]);
    }
    const double ret = diff/size;
    return ret >= 0.0 ? ret : 1e30; // what is not a number is not equal, and std::max() would lose it
}

// which rows of a batch are outputs
enum outputs { OUTPUT_LAST, OUTPUT_ALL, OUTPUT_NONE };

struct stage {
    llama_model   * model = nullptr;
    llama_context * ctx   = nullptr;

    int32_t il_begin;
    int32_t il_end;
    int32_t n_layer = 0;
    int32_t n_past  = 0;

    stage(const std::string & path, int32_t il_begin, int32_t il_end) : il_begin(il_begin), il_end(il_end) {
        llama_model_params mparams = llama_model_default_params();
        mparams.il_begin = il_begin;
        mparams.il_end   = il_end;
        model = llama_model_load_from_file(path.c_str(), mparams);
        if (!model) {
            return;
        }
        n_layer = llama_model_n_layer(model);

        llama_context_params cparams = llama_context_default_params();
        cparams.n_ctx           = N_CTX;
        cparams.n_batch         = N_CTX;
        cparams.n_ubatch        = N_UBATCH;
        cparams.n_outputs_max   = N_CTX;
        cparams.n_threads       = 1;
        cparams.n_threads_batch = 1;
        ctx = llama_init_from_model(model, cparams);
    }
    stage(const stage &) = delete;
    ~stage() {
        llama_free(ctx);
        llama_model_free(model);
    }

    bool first() const { return il_begin == 0; }
    bool last()  const { return il_end < 0 || il_end == n_layer; }

    // logits of the outputs of the last stage, else the state behind the last layer of the window
    floats decode(const std::vector<llama_token> & tokens, const floats * state, outputs which, int32_t * code = nullptr) {
        const int32_t n = tokens.size();
        llama_batch batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        for (int32_t i = 0; i < n; i++) {
            batch.token[i]     = tokens[i];
            batch.pos[i]       = n_past + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = which == OUTPUT_ALL || (which == OUTPUT_LAST && i == n - 1);
        }
        batch.embd = state ? const_cast<float *>(state->data()) : nullptr; // beside the token ids
        const int32_t ret = llama_decode(ctx, batch);
        batch.embd = nullptr;
        llama_batch_free(batch);
        if (code) {
            *code = ret;
        }
        if (ret != 0) {
            return {};
        }
        n_past += n;
        if (!last()) {
            const float * rows = llama_get_embeddings_layer_inp(ctx, il_end);
            return rows ? floats(rows, rows + size_t(n)*llama_model_n_embd_layer_inp(model, il_end)) : floats();
        }
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        const int32_t n_rows  = which == OUTPUT_ALL ? n : which == OUTPUT_LAST ? 1 : 0;
        const float * logits  = n_rows > 0 ? llama_get_logits(ctx) : nullptr;
        return logits ? floats(logits, logits + size_t(n_rows)*n_vocab) : floats();
    }

    floats layer_inp(int32_t il, int32_t n) const {
        const float * rows = llama_get_embeddings_layer_inp(ctx, il);
        return rows ? floats(rows, rows + size_t(n)*llama_model_n_embd_layer_inp(model, il)) : floats();
    }

    void clear() {
        llama_memory_clear(llama_get_memory(ctx), true);
        n_past = 0;
    }
};

using stage_ptr = std::unique_ptr<stage>;

static std::vector<llama_token> get_tokens(int32_t n, int32_t n_vocab, uint32_t seed) {
    std::mt19937 gen(seed);
    std::vector<llama_token> ret(n);
    for (auto & t : ret) {
        t = gen() % n_vocab;
    }
    return ret;
}

// logits of all calls, through a chain of stages
static std::vector<floats> run(const std::vector<stage *> & stages, outputs which) {
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(stages[0]->model));
    std::vector<floats> ret;
    for (size_t c = 0; c < CALLS.size(); c++) {
        const auto tokens = get_tokens(CALLS[c], n_vocab, 1000 + c);
        floats state;
        for (size_t s = 0; s < stages.size(); s++) {
            state = stages[s]->decode(tokens, s > 0 ? &state : nullptr, which);
        }
        ret.push_back(state);
    }
    return ret;
}

static double worst(const std::vector<floats> & a, const std::vector<floats> & b) {
    double ret = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        ret = std::max(ret, nmse(a[i], b[i]));
    }
    return ret;
}

// the input of every layer: provided, and independent of what is an output
static void test_layer_inp(stage & whole, const std::vector<floats> & expected) {
    const int32_t n_layer = whole.n_layer;
    CHECK(llama_set_embeddings_layer_inp(whole.ctx, -1,          true) == -1, "il = -1");
    CHECK(llama_set_embeddings_layer_inp(whole.ctx, n_layer + 1, true) == -1, "il = n_layer + 1");
    CHECK(llama_get_embeddings_layer_inp(whole.ctx, -1) == nullptr, "il = -1");
    CHECK(llama_get_embeddings_layer_inp(whole.ctx,  1) == nullptr, "not kept");
    CHECK(llama_model_n_embd_layer_inp(whole.model, n_layer + 1) == -1, "il = n_layer + 1");

    int32_t n_provided = 0;
    for (int32_t il = 0; il <= n_layer; il++) {
        const int32_t code = llama_set_embeddings_layer_inp(whole.ctx, il, true);
        CHECK(code == 0, "il = %d: %d", il, code);
        n_provided += code == 0;
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(whole.model));
    const auto tokens = get_tokens(CALLS[0], n_vocab, 1000);

    std::vector<floats> rows[2];
    double logits = 0.0;
    for (auto which : { OUTPUT_ALL, OUTPUT_LAST }) {
        whole.clear();
        const floats got = whole.decode(tokens, nullptr, which);
        if (which == OUTPUT_LAST) {
            logits = nmse(expected[0], got);
        }
        for (int32_t il = 0; il <= n_layer; il++) {
            rows[which == OUTPUT_LAST].push_back(whole.layer_inp(il, CALLS[0]));
        }
    }
    whole.clear();
    const double err = worst(rows[0], rows[1]);
    CHECK(err == 0.0, "rows depend on what is an output: NMSE %g", err);
    // other rows go through the last layer, so kernels for another number of rows are used
    CHECK(logits < 1e-8, "logits while the residual is kept: NMSE %g", logits);

    for (int32_t il = 0; il <= n_layer; il++) {
        CHECK(llama_set_embeddings_layer_inp(whole.ctx, il, false) == 0, "il = %d", il);
    }
    printf("  layer inputs: %d of %d, NMSE %g\n", n_provided, n_layer + 1, err);
}

static void test_refusals(const std::string & path, stage & second) {
    const int32_t n_layer = second.n_layer;
    const std::vector<std::pair<int32_t, int32_t>> windows = { { -1, 2 }, { 2, 2 }, { 2, 1 }, { 0, n_layer + 1 }, { n_layer, -1 } };
    for (const auto & [a, b] : windows) {
        const stage refused(path, a, b);
        CHECK(refused.model == nullptr, "[%d, %d)", a, b);
    }
    CHECK(!llama_model_can_split_at(second.model, 0) && !llama_model_can_split_at(second.model, n_layer), "at an end");

    int32_t code = 0;
    second.decode({ 1 }, nullptr, OUTPUT_LAST, &code);
    CHECK(code == -1, "without a state: %d", code);
    CHECK(llama_memory_seq_pos_max(llama_get_memory(second.ctx), 0) == -1, "memory changed");
}

// embeddings of a stage that is not the last: there are none, and its state is there all the same
static void test_embeddings(stage & first) {
    int32_t code = 0;
    llama_set_embeddings(first.ctx, true);
    const floats state = first.decode({ 1, 2 }, nullptr, OUTPUT_LAST, &code);
    CHECK(code == 0 && !state.empty(), "%d", code);
    CHECK(llama_get_embeddings(first.ctx) == nullptr, "a stage has embeddings");
    llama_set_embeddings(first.ctx, false);
    first.clear();

    llama_token token = 1;
    CHECK(llama_encode(first.ctx, llama_batch_get_one(&token, 1)) == -1, "a stage encodes");
}

static void test_model(const std::string & path) {
    stage whole(path, 0, -1);
    CHECK(whole.ctx != nullptr, "%s", path.c_str());
    if (!whole.ctx) {
        return;
    }
    CHECK(stage(path, 0, 0).model != nullptr, "parameters that are all zero are no window");
    char desc[64] = {};
    llama_model_meta_val_str(whole.model, "general.architecture", desc, sizeof(desc));
    printf("%s, %d layers\n", desc, whole.n_layer);

    const auto expected     = run({ &whole }, OUTPUT_LAST);
    whole.clear();
    const auto expected_all = run({ &whole }, OUTPUT_ALL);
    whole.clear();
    test_layer_inp(whole, expected);

    const int32_t n_layer = whole.n_layer;
    double  err     = 0.0;
    int32_t n_state = 0;
    auto chain = [&](const std::vector<int32_t> & cuts) {
        std::vector<stage_ptr> stages;
        std::vector<stage *>   ptrs;
        int32_t a = 0;
        for (size_t i = 0; i <= cuts.size(); i++) {
            const int32_t b = i < cuts.size() ? cuts[i] : -1;
            stages.push_back(std::make_unique<stage>(path, a, b));
            ptrs.push_back(stages.back().get());
            CHECK(ptrs.back()->ctx != nullptr, "[%d, %d)", a, b);
            if (!ptrs.back()->ctx) {
                return;
            }
            if (b >= 0) {
                const int32_t code = llama_set_embeddings_layer_inp(ptrs.back()->ctx, b, true);
                CHECK(code == 0, "[%d, %d): %d", a, b, code);
                n_state = llama_model_n_embd_layer_inp(ptrs.back()->model, b);
                CHECK(llama_get_logits(ptrs.back()->ctx) == nullptr, "[%d, %d) has logits", a, b);
            }
            a = b;
        }
        for (auto which : { OUTPUT_LAST, OUTPUT_ALL }) {
            const double e = worst(which == OUTPUT_LAST ? expected : expected_all, run(ptrs, which));
            CHECK(e == 0.0, "NMSE %g", e);
            err = std::max(err, e);
            for (auto & s : stages) {
                s->clear();
            }
        }
        if (cuts.size() == 1 && cuts[0] == 1) {
            test_refusals(path, *stages.back());
            test_embeddings(*stages.front());
        }
    };
    int32_t n_cuts = 0;
    for (int32_t il = 1; il < n_layer; il++) {
        CHECK(llama_model_can_split_at(whole.model, il), "%d", il);
        chain({ il });
        n_cuts++;
    }
    if (n_layer > 2) {
        chain({ n_layer/3, 2*n_layer/3 });
    }
    printf("  two stages at %d cuts, three stages: NMSE %g, state of %d floats\n", n_cuts, err, n_state);
}

static void on_log(enum ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR && getenv("VERBOSE")) {
        fputs(text, stderr);
    }
}

int main(int argc, char ** argv) {
    if (argc < 2) {
        printf("usage: %s MODEL.gguf ...\n", argv[0]);
        return 2;
    }
    llama_log_set(on_log, nullptr);
    llama_backend_init();
    for (int i = 1; i < argc; i++) {
        test_model(argv[i]);
    }
    llama_backend_free();
    printf(n_failed == 0 ? "all equal\n" : "%d checks failed\n", n_failed);
    return n_failed == 0 ? 0 : 1;
}
