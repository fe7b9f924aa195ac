// Messages between ranks that are threads of one process: a `Post` for all ranks of a communicator.
//
// The k-th send from a rank to another with a tag meets the k-th receive. The later of the two copies the bytes. A short
// send without a receive is copied at once, and has ended; a longer one waits in its place.
//
// Threads. Every rank has a box for the messages to this rank. Its lock guards the matching, not the copy: a message
// taken out of a box belongs to the thread that copies, so that a cancellation finds it no more.
#pragma once
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "engine/tables.h"
#include "engine/wire.h"

namespace gpucoll {

// Most bytes of a send that does not wait for its receive: a greeting with data must fit.
static const uint64_t COPIED = 2 * OPENING;

class Post {
  public:
    // A send or a receive without a partner so far.
    struct Letter {
        uint32_t source;
        bool sends;
        uint64_t tag;
        char* row;
        uint64_t nbytes;
        WireMessage* message;       // null: the send has ended, with a copy in `content`
        std::vector<char> content;  // moved with the letter, and so stays where it is
    };

    explicit Post(uint32_t ranks) : boxes(ranks) {}

    // Match a letter to rank `to` with the first partner, or let it wait. Throws std::bad_alloc.
    void put(uint32_t to, Letter mine) {
        Box& box = boxes[to];
        Letter other;
        {
            const std::lock_guard<std::mutex> guard(box.lock);
            const auto found = std::find_if(box.letters.begin(), box.letters.end(), [&](const Letter& one) {
                return one.source == mine.source && one.tag == mine.tag && one.sends != mine.sends;
            });
            if (found == box.letters.end()) {
                WireMessage* sent = mine.sends && mine.nbytes <= COPIED ? mine.message : nullptr;
                if (sent != nullptr) {
                    mine.content.assign(mine.row, mine.row + mine.nbytes);
                    mine.row = mine.content.data();
                    mine.message = nullptr;
                }
                box.letters.push_back(std::move(mine));
                if (sent != nullptr) end(*sent);
                return;
            }
            other = std::move(*found);
            box.letters.erase(found);
        }
        const Letter &sent = mine.sends ? mine : other, &came = mine.sends ? other : mine;
        const uint64_t nbytes = std::min(sent.nbytes, came.nbytes);
        if (nbytes > 0) std::memcpy(came.row, sent.row, nbytes);
        came.message->length = sent.nbytes;
        if (sent.message != nullptr) end(*sent.message);
        if (sent.nbytes > came.nbytes) {
            fail(*came.message, EMSGSIZE);
        } else {
            end(*came.message);
        }
    }

    // Take a receive out of the box of rank `to`, if it still waits there.
    void withdraw(uint32_t to, WireMessage& message) {
        Box& box = boxes[to];
        const std::lock_guard<std::mutex> guard(box.lock);
        const auto found = std::find_if(box.letters.begin(), box.letters.end(), [&](const Letter& one) { return one.message == &message; });
        if (found == box.letters.end()) return;
        box.letters.erase(found);
        fail(message, ECANCELED);
    }

    // Release: the fields of the message, and the bytes received, are complete for the thread that reads the state.
    static void fail(WireMessage& message, int error) {
        message.error = error;
        message.state.store(WireMessage::FAILED, std::memory_order_release);
    }

  private:
    struct Box {
        std::mutex lock;
        std::vector<Letter> letters;  // in the order of posting; never a send and a receive that match
    };

    static void end(WireMessage& message) { message.state.store(WireMessage::DONE, std::memory_order_release); }

    std::vector<Box> boxes;
};

// The end of a rank.
class ThreadWire final : public Wire {
  public:
    ThreadWire(std::shared_ptr<Post> shared, uint32_t own) : post(std::move(shared)), rank(own) {}

    void send(WireMessage& message, uint32_t peer, uint64_t tag, const void* row, uint64_t nbytes) noexcept override {
        // The row of a send is only read.
        put(message, peer, peer, {rank, true, tag, const_cast<char*>(static_cast<const char*>(row)), nbytes, &message, {}});
    }
    void receive(WireMessage& message, uint32_t peer, uint64_t tag, void* row, uint64_t nbytes) noexcept override {
        put(message, peer, rank, {peer, false, tag, static_cast<char*>(row), nbytes, &message, {}});
    }
    bool progress() noexcept override { return false; }  // the partner's thread copies
    void cancel(WireMessage& message) noexcept override { post->withdraw(message.sends ? message.peer : rank, message); }
    const char* reason(int error) const noexcept override { return std::strerror(error); }

  private:
    void put(WireMessage& message, uint32_t peer, uint32_t to, Post::Letter letter) noexcept {
        message.peer = peer;
        message.sends = letter.sends;
        message.state.store(WireMessage::UNDER_WAY, std::memory_order_relaxed);
        try {
            post->put(to, std::move(letter));
        } catch (const std::bad_alloc&) {
            Post::fail(message, ENOMEM);
        }
    }

    std::shared_ptr<Post> post;
    uint32_t rank;
};

}  // namespace gpucoll
